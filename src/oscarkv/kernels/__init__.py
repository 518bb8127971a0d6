"""Attention over a packed cache: one interface, several backends.

`interface.py` says what a backend does, `torch_backend.py` is the oracle every other backend is
tested against. Imports `codec`, `recipe` and `errors`; knows nothing of caches or engines.
"""

from oscarkv.kernels.interface import AttentionBackend, LayerCache, Transforms
from oscarkv.kernels.registry import available_backends, get_backend

__all__ = ["AttentionBackend", "LayerCache", "Transforms", "available_backends", "get_backend"]
