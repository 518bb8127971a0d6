"""Which tokens have an exact copy, and in which pages: the books of the scheduler's process.

A unit is 16 consecutive slots of a history page. It may have a window: a page of its own, which
then holds the exact keys and values of those 16 tokens. So windows go where history pages go: into
the radix cache, to every request that shares them, and away with them.

A request holds the windows that its next queries read. Others are idle: they lie in the radix
cache until somebody needs their page. Those that a request left behind while it went on are the
first to go; those at an end, where the next turn of a chat goes on, compete with cached pages by
age.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.serving.windows import WindowRule


@dataclass
class Holding:
    """What is known of one request."""

    pages: list[int] = field(default_factory=list)  # of its history
    held: dict[int, int] = field(default_factory=dict)  # block of the request -> unit
    longest: int = 0  # tokens it may come to
    shared: int = 0  # tokens whose pages were found in the cache, with or without windows
    reading: bool = False  # its prompt comes in chunks, and more of them are to come


class Windows:
    """Pages are numbers here; the allocator gives and takes them."""

    def __init__(self, rule: WindowRule) -> None:
        self.rule = rule
        self.per_page = rule.page // PAGE_QUANTUM
        self.reset()

    def reset(self) -> None:
        self.page_of: dict[int, int] = {}  # unit -> the page of its window
        self.holders: dict[int, int] = {}  # unit -> requests that hold it
        self.left: OrderedDict[int, None] = OrderedDict()  # idle units, oldest first
        self.ends: OrderedDict[int, float] = OrderedDict()  # the same, and since when
        self.requests: dict[str, Holding] = {}
        self.changed: set[int] = set()  # units the device does not know of yet

    # -- counts --------------------------------------------------------------------------------

    @property
    def idle(self) -> int:
        return len(self.left) + len(self.ends)

    @property
    def held(self) -> int:
        return len(self.page_of) - self.idle

    def real(self, first: int, last: int, end: int) -> list[int]:
        """Of the blocks first to last those that must be real once `end` tokens are there."""
        sink, tail = self.rule.sink_blocks, self.rule.tail_start(end)
        return [*range(first, min(sink, last)), *range(max(first, sink, tail), last)]

    # -- units ---------------------------------------------------------------------------------

    def unit(self, pages: Sequence[int], block: int) -> int:
        return pages[block // self.per_page] * self.per_page + block % self.per_page

    def attach(self, unit: int, page: int) -> None:
        self.page_of[unit] = page
        self.changed.add(unit)

    def hold(self, holding: Holding, block: int, unit: int) -> None:
        if block in holding.held:
            return
        holding.held[block] = unit
        self.holders[unit] = self.holders.get(unit, 0) + 1
        self.left.pop(unit, None)
        self.ends.pop(unit, None)

    def _release(self, holding: Holding, blocks: Iterable[int], at_end: bool) -> None:
        now = time.monotonic()
        for block in blocks:
            unit = holding.held.pop(block)
            self.holders[unit] -= 1
            if self.holders[unit]:
                continue
            del self.holders[unit]
            if at_end:
                self.ends[unit] = now
            else:
                self.left[unit] = None

    def let_go_before(self, holding: Holding, end: int) -> None:
        """Of what no query from `end` tokens on reads."""
        sink, tail = self.rule.sink_blocks, self.rule.tail_start(end)
        gone = [block for block in holding.held if sink <= block < tail]
        self._release(holding, gone, at_end=False)

    def finish(self, name: str) -> None:
        """A request is done with: its windows stay for those that go on where it ended."""
        holding = self.requests.pop(name, None)
        if holding is not None:
            self._release(holding, list(holding.held), at_end=True)

    def keep_idle(self, unit: int, page: int) -> None:
        """A window that only other requests may read."""
        self.attach(unit, page)
        self.ends[unit] = time.monotonic()

    def drop_left(self) -> int | None:
        """The page of the window that was left behind longest ago."""
        return self._drop(self.left) if self.left else None

    def drop_end(self) -> int | None:
        return self._drop(self.ends) if self.ends else None

    def _drop(self, idle: OrderedDict[int, None] | OrderedDict[int, float]) -> int:
        unit, _ = idle.popitem(last=False)
        self.changed.add(unit)
        return self.page_of.pop(unit)

    @property
    def oldest_end(self) -> float:
        return next(iter(self.ends.values()), float("inf"))

    def forget(self, page: int) -> list[int]:
        """A history page is freed: the pages of its windows are free with it."""
        freed = []
        for unit in range(page * self.per_page, (page + 1) * self.per_page):
            found = self.page_of.pop(unit, None)
            if found is not None:
                freed.append(found)
                self.holders.pop(unit, None)
                self.left.pop(unit, None)
                self.ends.pop(unit, None)
                self.changed.add(unit)
        return freed

    # -- the radix cache -----------------------------------------------------------------------

    def ready(self, pages: Sequence[int], boundary: int) -> bool:
        """Whether a request may go on after `boundary` tokens in these pages."""
        needed = [*range(min(self.rule.sink_blocks, boundary // PAGE_QUANTUM))]
        needed += self.rule.before_hit(boundary)
        return all(self.unit(pages, block) in self.page_of for block in reversed(needed))

    def replace(self, name: str | None, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """A request's pages give way to others with the same tokens, which then need its windows
        where they have none. The request's own are freed next, with what is left of theirs."""
        holding = None if name is None else self.requests.get(name)
        for index, (old, new) in enumerate(zip(mine, theirs, strict=True)):
            if old == new:
                continue
            if holding is not None:
                holding.pages[index] = new
            for offset in range(self.per_page):
                self._replace_unit(
                    holding,
                    index * self.per_page + offset,
                    old * self.per_page + offset,
                    new * self.per_page + offset,
                )

    def _replace_unit(self, holding: Holding | None, block: int, old: int, new: int) -> None:
        if old not in self.page_of:
            return
        held = holding is not None and block in holding.held
        if held:
            assert holding is not None
            self._release(holding, [block], at_end=True)
        if new not in self.page_of:
            self.attach(new, self.page_of.pop(old))
            self.changed.add(old)
            self.ends.pop(old, None)
            self.left.pop(old, None)
            self.ends[new] = time.monotonic()
        if held:
            assert holding is not None
            self.hold(holding, block, new)
