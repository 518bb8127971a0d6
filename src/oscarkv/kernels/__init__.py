"""Attention over a packed cache: one interface, several backends.

`interface.py` says what a backend does, `torch_backend.py` is the oracle every other backend is
tested against, `registry.py` finds the fastest that can run here. Imports `codec`, `recipe` and
`errors`; knows nothing of caches or engines.
"""

from oscarkv.kernels.interface import AttentionBackend, LayerCache, Transforms
from oscarkv.kernels.registry import (
    BackendStatus,
    available_backends,
    backend_statuses,
    get_backend,
)

__all__ = [
    "AttentionBackend",
    "BackendStatus",
    "LayerCache",
    "Transforms",
    "available_backends",
    "backend_statuses",
    "get_backend",
]
