"""Sequences in pages: a packed history and exact windows, with sharing and copy-on-write.

Imports `kernels` and below; knows nothing of any engine. Serving engines bring their own block
managers and use `kernels` directly; this is the cache for everyone else.
"""

from oscarkv.cache.allocator import PageAllocator
from oscarkv.cache.paged import PagedCache, Step

__all__ = ["PageAllocator", "PagedCache", "Step"]
