"""SGLang's radix cache, in which a prefix counts as far as its windows are there.

Prompts and answers are cached alike, in whole pages. A hit needs the sink's windows and those of
the last recent - 1 tokens before its end; where they are gone it ends earlier. Nothing inside a
window is ever read packed instead.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache

from oscarkv.integrations.sglang.allocator import OscarAllocator

#: Waiting requests whose wish is remembered.
WANTED = 4096


class OscarTree(RadixCache):  # type: ignore[misc]
    token_to_kv_pool_allocator: OscarAllocator

    def __init__(self, params: Any) -> None:
        self.wanted: dict[str, int] = {}  # request -> tokens it would have found, had it windows
        self._publishing: str | None = None  # the request that is being cached
        super().__init__(params)

    def reset(self) -> None:
        self.wanted.clear()
        super().reset()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = super().match_prefix(params)
        if params.req is None or not found.device_prefix_len:  # a look at the tree's own pages
            return found
        allocator, length = self.token_to_kv_pool_allocator, found.device_prefix_len
        pages = allocator.pages_of(self.path_device_indices(found.last_device_node))
        while length and not allocator.windows.ready(pages, length):
            length -= self.page_size
        if length == found.device_prefix_len:
            self.wanted.pop(params.req.rid, None)
            return found
        self.wanted[params.req.rid] = found.device_prefix_len
        if len(self.wanted) > WANTED:  # of requests that were given up while they waited
            del self.wanted[next(iter(self.wanted))]
        if not length:
            return self._empty_match_result
        return super().match_prefix(MatchPrefixParams(key=params.key[:length]))

    def checkpoint(self, req: Any, *, up_to: int, **options: Any) -> None:
        self._publishing = req.rid
        try:
            super().checkpoint(req, up_to=up_to, **options)
        finally:
            self._publishing = None
            self.token_to_kv_pool_allocator.publish()

    def insert(self, params: InsertParams) -> InsertResult:
        """Where the tree has pages of the same tokens already, SGLang takes those and frees the
        request's: hand over the windows in between."""
        result = super().insert(params)
        if self._publishing is not None and result.prefix_len:
            allocator, shared = self.token_to_kv_pool_allocator, result.prefix_len
            path = self.path_device_indices(result.last_device_node)
            allocator.windows.replace(
                self._publishing,
                allocator.pages_of(params.value[:shared]),
                allocator.pages_of(path[:shared]),
            )
        return result

    def protected_size(self) -> int:
        """What running requests hold of the tree, and of windows beyond the pages that are there
        for them: SGLang adds this up with what is free."""
        allocator = self.token_to_kv_pool_allocator
        return int(super().protected_size() + allocator.window_excess * self.page_size)

    def oldest_leaf(self) -> float:
        """When the tree's oldest evictable leaf was last used."""
        return min((leaf.last_access_time for leaf in self.evictable_leaves), default=float("inf"))


def make_tree(context: Any) -> OscarTree:
    """A factory for SGLang's registry of radix caches."""
    return OscarTree(context.params)
