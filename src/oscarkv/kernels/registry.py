"""Which backends there are, which of them can run here, and which one to take.

A backend other than torch is a package with `unusable_reason() -> str | None`, cheap to ask, and
its class in the module `backend`. Neither is imported before somebody asks for it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from oscarkv.errors import OscarError
from oscarkv.kernels.interface import AttentionBackend
from oscarkv.kernels.torch_backend import TorchBackend


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here; if not, why, and what to do about it."""

    name: str
    usable: bool
    reason: str | None = None


@dataclass(frozen=True)
class _Entry:
    unusable_reason: Callable[[], str | None]
    make: Callable[[], AttentionBackend]


def _package(name: str, class_name: str, install: str) -> _Entry:
    """The backend of the package `oscarkv.kernels.<name>`; `install` brings what it needs."""
    package = f"oscarkv.kernels.{name}"

    def unusable_reason() -> str | None:
        try:
            reason = importlib.import_module(package).unusable_reason()
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            if missing == package:
                return "this build of oscarkv does not have it"
            return f"{missing} is not installed: {install}"
        except Exception as error:  # a broken driver or library must not take torch down with it
            return f"could not be loaded ({_cause(error)}): {install}"
        return cast("str | None", reason)

    def make() -> AttentionBackend:
        made = getattr(importlib.import_module(f"{package}.backend"), class_name)()
        return cast(AttentionBackend, made)

    return _Entry(unusable_reason, make)


#: Fastest first; torch needs nothing but a device with float64.
_ENTRIES = {
    "cuda": _package("cuda", "CudaBackend", 'pip install "oscarkv[cuda]"'),
    "triton": _package("triton", "TritonBackend", "pip install triton"),
    "torch": _Entry(lambda: None, TorchBackend),
}
#: Backends that seemed usable but could not be started, and the cause: `auto` tries them once.
_failed: dict[str, str] = {}


def backend_statuses() -> list[BackendStatus]:
    """Every backend, fastest first. Asking starts none of them."""
    return [_status(name) for name in _ENTRIES]


def available_backends() -> list[str]:
    """Backends that can run here, fastest first."""
    return [status.name for status in backend_statuses() if status.usable]


def get_backend(name: str = "auto", device: torch.device | str | None = None) -> AttentionBackend:
    """A fresh backend; `auto` takes the fastest that can run here, or on `device` if it is given.

    Where `auto` finds that a backend cannot be started after all (its kernels do not compile), it
    says so once, in a warning, and takes the next.
    """
    if name != "auto":
        return _named(name)
    on_cpu = device is not None and torch.device(device).type == "cpu"
    for candidate in ["torch"] if on_cpu else available_backends():
        try:
            return _ENTRIES[candidate].make()
        except Exception as error:
            if candidate == "torch":
                raise
            _failed[candidate] = _cause(error)
            warnings.warn(
                f"the {candidate} backend could not be started, so a slower one is used: "
                f"{_failed[candidate]}",
                RuntimeWarning,
                stacklevel=2,
            )
    raise AssertionError("the torch backend is always available")


def _named(name: str) -> AttentionBackend:
    if name not in _ENTRIES:
        raise OscarError(f"unknown backend {name!r}; known: auto, {', '.join(_ENTRIES)}")
    reason = _ENTRIES[name].unusable_reason()
    if reason is not None:
        raise OscarError(f"the {name} backend cannot run here: {reason}")
    try:
        made = _ENTRIES[name].make()
    except OscarError:
        raise
    except Exception as error:
        raise OscarError(f"the {name} backend could not be started: {_cause(error)}") from error
    _failed.pop(name, None)
    return made


def _status(name: str) -> BackendStatus:
    reason = _ENTRIES[name].unusable_reason()
    if reason is None and name in _failed:
        reason = f"could not be started: {_failed[name]}"
    return BackendStatus(name, reason is None, reason)


def _cause(error: Exception) -> str:
    """A compiler's log can be pages; its beginning names the error."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else f"{text[:400]} ..."
    if isinstance(error, OscarError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
