"""Pages for history and for windows, from one list.

SGLang counts the tokens of histories. The pool has pages beyond those, for the windows that as many
requests of the longest length hold as fit its tokens; windows take from these first, and what they
take beyond is missing in `available_size`. Whether a step fits is asked in pages, where there is no
such line.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.serving.windows import blocks_for
from oscarkv.integrations.sglang.pool import OscarPool
from oscarkv.integrations.sglang.windows import Holding, Windows

#: New tokens of a running request that admission counts at most, as SGLang does.
FUTURE = 4096


class OscarAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator, whose list of free pages is known to the host as well."""

    free_pages: Tensor

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: OscarPool,
        need_sort: bool,
    ) -> None:
        self.pool = kvcache
        self.windows = Windows(kvcache.rule)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    def clear(self) -> None:
        self.num_pages = self.size // self.page_size + self.pool.window_pages
        super().clear()
        self._free = list(range(self.num_pages, 0, -1))  # the next one last
        self.fresh: list[int] = []  # history pages that were taken last
        self.windows.reset()
        self.pool.window_of.zero_()

    # -- counts --------------------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Pages that are free, or hold windows that nobody reads."""
        return len(self._free) + self.windows.idle

    @property
    def window_excess(self) -> int:
        """Pages that windows took from histories."""
        return max(0, self.windows.held - self.pool.window_pages)

    def available_size(self) -> int:
        """Tokens, as SGLang counts them."""
        unused = max(0, self.pool.window_pages - self.windows.held)
        return (self.free_count - unused) * self.page_size

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        return WindowBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Tokens, as pages, of a request's windows. Those of one whose prompt is being read are in
        `WindowBudget.growth` from its first chunk on: asked for again, they might not be there, and
        SGLang would let it wait with its pages in hand."""
        if has_req_pool_slot and any(one.reading for one in self.windows.requests.values()):
            return 0
        return self.windows.rule.at_prefill(prefill_tokens) * self.page_size

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, **_: Any
    ) -> int | None:
        """An empty pool must hold the request, and a page more, which admission asks for."""
        windows = self.windows.rule.at_prefill(input_tokens + max_new_tokens)
        room = (self.num_pages - windows - blocks_for(input_tokens, self.page_size) - 1) * (
            self.page_size
        )
        return None if room <= 0 else min(max_new_tokens, room - 1)

    def get_extend_allocation_demand(
        self, prefix_lens_cpu: Tensor, seq_lens_cpu: Tensor, **_: Any
    ) -> int:
        pages = get_num_new_pages(seq_lens_cpu, self.page_size, prefix_lens_cpu)
        for start, end in zip(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), strict=True):
            pages += len(self.windows.real(blocks_for(start), blocks_for(end), end))
        return int(pages * self.page_size)

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        begun = sum(request.kv.kv_committed_len % PAGE_QUANTUM == 0 for request in requests or ())
        pages = blocks_for(num_tokens, self.page_size) + begun
        self._make_room(pages, tree_cache)
        return self.free_count >= pages

    def verify_byte_accounting(self) -> list[str]:
        """SGLang asks when it is idle."""
        wrong = []
        if self.windows.requests or self.windows.holders:
            wrong.append(f"oscarkv: windows of requests that are gone: {self.windows.requests}")
        if len(self._free) != len(self.free_pages):
            wrong.append("oscarkv: host and device disagree about free pages")
        return wrong

    # -- pages ---------------------------------------------------------------------------------

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        self._make_room(blocks_for(num_tokens, self.page_size), tree_cache)
        return None

    def _make_room(self, pages: int, tree: Any = None) -> None:
        """Have so many pages really free, if there are: windows left behind go first, then
        windows at ends and leaves of the tree, whichever was used longest ago."""
        while len(self._free) < pages:
            page = self.windows.drop_left()
            if page is None:
                leaf = float("inf") if tree is None else tree.oldest_leaf()
                if leaf < self.windows.oldest_end:
                    tree.evict(EvictParams(num_tokens=self.page_size))
                    continue
                page = self.windows.drop_end()
            if page is None:
                return
            self._give([page])

    def _give(self, pages: list[int]) -> None:
        given = torch.tensor(pages, dtype=torch.int64).to(self.device, non_blocking=True)
        self.free_pages = torch.cat((given, self.free_pages))
        self._free.extend(reversed(pages))

    def _taken(self, count: int) -> list[int]:
        """SGLang took the first pages of its list; so does ours."""
        return [self._free.pop() for _ in range(count)]

    def _take_for_window(self) -> int:
        self._make_room(1)
        self.free_pages = self.free_pages[1:]
        return self._free.pop()

    def alloc(self, need_size: int) -> Tensor | None:
        pages = need_size // self.page_size
        self._make_room(pages)
        made = super().alloc(need_size)
        if made is not None:
            self._taken(pages)
        return made

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        pages = get_num_new_pages(seq_lens_cpu, self.page_size, prefix_lens_cpu)
        self._make_room(pages)
        made = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            pages,
        )
        self.fresh = [] if made is None else self._taken(pages)
        return made

    def alloc_decode(
        self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
    ) -> Tensor | None:
        pages = get_num_new_pages(seq_lens_cpu, self.page_size, decode=True)
        self._make_room(pages)
        made = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        self.fresh = [] if made is None else self._taken(pages)
        return made

    def _release_page_ids(self, *page_ids: Tensor) -> None:
        """Windows go with their pages. The host must know which: this waits for the device."""
        pages = torch.cat(page_ids).tolist()
        for page in list(pages):
            pages += self.windows.forget(page)
        self._give(pages)

    # -- windows -------------------------------------------------------------------------------

    def hold_hits(self, batch: Any) -> None:
        """Before a step's pages are taken: keep what its requests found in the cache."""
        for request, found in zip(batch.reqs, batch.prefix_lens, strict=True):
            if request.rid in self.windows.requests:
                continue
            more = min(request.sampling_params.max_new_tokens, FUTURE)
            holding = Holding(longest=len(request.origin_input_ids) + more)
            holding.shared = batch.tree_cache.wanted.pop(request.rid, 0)
            self.windows.requests[request.rid] = holding
            if not found:
                continue
            holding.pages = self.pages_of(batch.tree_cache.prefix_device_indices(request))
            rule, last = self.windows.rule, found // PAGE_QUANTUM
            for block in (*range(min(rule.sink_blocks, last)), *rule.before_hit(found)):
                unit = self.windows.unit(holding.pages, block)
                assert unit in self.windows.page_of, "a hit without its windows"
                self.windows.hold(holding, block, unit)

    def extend(self, batch: Any) -> None:
        """After a step's pages are taken: its tokens' windows."""
        fresh, ends = iter(self.fresh), batch.seq_lens_cpu.tolist()
        steps = [
            (self.windows.requests[request.rid], start, end)
            for request, start, end in zip(batch.reqs, batch.prefix_lens, ends, strict=True)
        ]
        for request, (holding, _, end) in zip(batch.reqs, steps, strict=True):
            holding.reading = end < len(request.origin_input_ids) + len(request.output_ids)
        for holding, start, end in steps:
            while len(holding.pages) < blocks_for(end, self.page_size):
                holding.pages.append(next(fresh))
            self.windows.let_go_before(holding, start)
            self._attach(holding, self.windows.real(blocks_for(start), blocks_for(end), end))
        if not batch.tree_cache.disable:
            for step in steps:
                self._attach_for_others(*step)
        self.publish()

    def _attach(self, holding: Holding, blocks: list[int]) -> None:
        for block in blocks:
            unit = self.windows.unit(holding.pages, block)
            if unit not in self.windows.page_of:
                self.windows.attach(unit, self._take_for_window())
            self.windows.hold(holding, block, unit)

    def _attach_for_others(self, holding: Holding, start: int, end: int) -> None:
        """Windows before page boundaries where others may go on: the end of what the request was
        found to share, and those of its prompt's last turn. Only from pages that nobody uses."""
        rule, new = self.windows.rule, range(blocks_for(start), blocks_for(end))
        wanted = {*rule.before_hit(holding.shared), *rule.last_turn(end)}
        for block in sorted(wanted, reverse=True):
            unit = self.windows.unit(holding.pages, block) if block in new else None
            if self._free and unit is not None and unit not in self.windows.page_of:
                self.windows.keep_idle(unit, self._take_for_window())

    def advance(self, batch: Any) -> None:
        """After a decode step's pages are taken."""
        fresh = iter(self.fresh)
        lengths = batch.seq_lens_cpu.tolist()  # without the new tokens
        self._make_room(sum(n % PAGE_QUANTUM == 0 for n in lengths), batch.tree_cache)
        for request, length in zip(batch.reqs, lengths, strict=True):
            holding = self.windows.requests[request.rid]
            if length % self.page_size == 0:
                holding.pages.append(next(fresh))
            self.windows.let_go_before(holding, length)
            if length % PAGE_QUANTUM == 0:
                self._attach(holding, [length // PAGE_QUANTUM])
        self.publish()

    def publish(self) -> None:
        """Tell the device which units have windows now."""
        changed = sorted(self.windows.changed)
        if not changed:
            return
        self.windows.changed.clear()
        pages = [self.windows.page_of.get(unit, 0) for unit in changed]
        both = torch.tensor([changed, pages], dtype=torch.int64).to(self.device, non_blocking=True)
        self.pool.window_of[both[0]] = both[1].to(torch.int32)

    def pages_of(self, slots: Tensor) -> list[int]:
        """The pages of a request's first tokens. Waits for the device."""
        return (slots[:: self.page_size] // self.page_size).tolist()


class WindowBudget(PrefillBudget):  # type: ignore[misc]
    """SGLang's budget in real pages, less what windows will grow by: those of running requests,
    and of one whose prompt is being read."""

    def __init__(
        self, allocator: OscarAllocator, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        rule, requests = allocator.windows.rule, allocator.windows.requests.values()
        self.reading = sum(
            max(0, rule.at_prefill(one.longest) - len(one.held)) for one in requests if one.reading
        )
        self.growth = self.reading + sum(
            max(0, rule.at_decode(one.longest) - len(one.held))
            for one in requests
            if not one.reading
        )

    def _available_and_evictable(self) -> int:
        pages = self.allocator.free_count - self.growth
        return int(pages * self.page_size + self.tree_cache.evictable_size())

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Of the next chunk of a prompt. It may take what others would grow into, who can be
        retracted; where there is nothing, it waits, and nobody else comes in meanwhile."""
        room = self.remaining_total
        if room <= 0:
            room = self.remaining_current + (self.growth - self.reading) * self.page_size
        return min(chunk_limit, int(room)) if room > 0 else None
