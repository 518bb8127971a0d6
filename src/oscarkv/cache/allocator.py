"""Pages by number, with reference counts."""

from __future__ import annotations

import heapq

from oscarkv.errors import CacheError


class PageAllocator:
    """Hands out page numbers 1 .. capacity - 1; page 0 stands for "no page" in block tables.

    A page is shared by taking another reference; it is free again when the last one is released.
    """

    def __init__(self, capacity: int = 1) -> None:
        if capacity < 1:
            raise CacheError("a page pool needs at least page 0")
        self._references = [0] * capacity
        self._free = list(range(1, capacity))

    @property
    def capacity(self) -> int:
        return len(self._references)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.capacity - 1 - self.free_pages

    def grow(self, pages: int) -> None:
        first = self.capacity
        self._references.extend([0] * pages)
        for page in range(first, first + pages):
            heapq.heappush(self._free, page)

    def allocate(self) -> int:
        if not self._free:
            raise CacheError(f"no free page among {self.capacity - 1}; grow the pool first")
        page = heapq.heappop(self._free)  # the lowest: pools stay dense and runs repeatable
        self._references[page] = 1
        return page

    def references(self, page: int) -> int:
        return self._references[page]

    def share(self, page: int) -> int:
        """Take another reference to a page in use; page 0 is passed through."""
        if page:
            self._check_used(page)
            self._references[page] += 1
        return page

    def release(self, page: int) -> None:
        """Give up one reference; page 0 is ignored."""
        if not page:
            return
        self._check_used(page)
        self._references[page] -= 1
        if not self._references[page]:
            heapq.heappush(self._free, page)

    def compact(self, kept: list[int]) -> None:
        """Renumber: old page kept[i] becomes page i, all others must be free and cease to exist."""
        if kept[0] != 0 or len(kept) != self.used_pages + 1:
            raise CacheError("compact: every page in use must be kept, and page 0 stay page 0")
        self._references = [self._references[page] for page in kept]
        self._free = []

    def _check_used(self, page: int) -> None:
        if not 0 < page < self.capacity or not self._references[page]:
            raise CacheError(f"page {page} is not in use")
