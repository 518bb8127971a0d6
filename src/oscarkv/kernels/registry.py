"""Which backends there are, and which one to take."""

from __future__ import annotations

from oscarkv.errors import OscarError
from oscarkv.kernels.interface import AttentionBackend
from oscarkv.kernels.torch_backend import TorchBackend

_BACKENDS = {"torch": TorchBackend}


def available_backends() -> list[str]:
    """Backends that can run here, fastest first."""
    return list(_BACKENDS)


def get_backend(name: str = "auto") -> AttentionBackend:
    """A fresh backend; `auto` takes the fastest that can run here."""
    if name == "auto":
        name = available_backends()[0]
    if name not in _BACKENDS:
        raise OscarError(f"unknown backend {name!r}; available: auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[name]()
