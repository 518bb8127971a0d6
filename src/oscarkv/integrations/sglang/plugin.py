"""The entry point of group `sglang.srt.plugins`. SGLang calls it in every one of its processes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from oscarkv.errors import MissingDependencyError

#: The versions of SGLang whose interfaces this was written against.
TESTED = ("0.5.23",)

_registered = False


def register() -> None:
    """Make the attention backend known. Does nothing to a server that does not ask for it."""
    global _registered
    if _registered:
        return
    _registered = True
    from oscarkv.integrations.sglang import hooks

    try:
        check_version(engine_version())
    except MissingDependencyError as error:
        hooks.install_version_refusal(error)
        return
    hooks.install()


def engine_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise MissingDependencyError(
            'SGLang is not installed; pip install "oscarkv[sglang]"'
        ) from None


def check_version(found: str) -> None:
    if not any(found == tested or found.startswith(f"{tested}.post") for tested in TESTED):
        raise MissingDependencyError(
            f"oscarkv's SGLang plugin knows SGLang {', '.join(TESTED)}, and this is {found}; "
            "install one of those, or uninstall oscarkv from this environment"
        )
