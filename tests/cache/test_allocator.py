"""Pages by number: none lost, none handed out twice, under any order of operations."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oscarkv.cache import PageAllocator
from oscarkv.errors import CacheError


class AllocatorMachine(RuleBasedStateMachine):
    """A plain counter of references is the model."""

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.pages = PageAllocator(capacity)
        self.capacity = capacity
        self.held: Counter[int] = Counter()

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule()
    def allocate(self) -> None:
        if len(self.held) == self.capacity - 1:
            with pytest.raises(CacheError, match="no free page"):
                self.pages.allocate()
            return
        page = self.pages.allocate()
        free = set(range(1, self.capacity)) - set(self.held)
        assert page == min(free)
        self.held[page] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = self.pick(data)
        assert self.pages.share(page) == page
        self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = self.pick(data)
        self.pages.release(page)
        self.held[page] -= 1
        if not self.held[page]:
            del self.held[page]

    @rule(pages=st.integers(0, 4))
    def grow(self, pages: int) -> None:
        self.pages.grow(pages)
        self.capacity += pages

    @rule(page=st.integers(-2, 12))
    def pages_not_in_use_are_refused(self, page: int) -> None:
        if page in self.held:
            return
        for operation in (self.pages.share, self.pages.release):
            if page == 0:
                operation(page)
            else:
                with pytest.raises(CacheError, match=f"page {page} is not in use"):
                    operation(page)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pages.capacity == self.capacity
        assert self.pages.used_pages == len(self.held)
        assert self.pages.free_pages == self.capacity - 1 - len(self.held)
        for page in range(self.capacity):
            assert self.pages.references(page) == self.held[page]


AllocatorMachine.TestCase.settings = settings(deadline=None, max_examples=40)
TestAllocator = AllocatorMachine.TestCase


def test_a_pool_has_page_0() -> None:
    with pytest.raises(CacheError, match="page 0"):
        PageAllocator(0)
