"""Random lives of a cache, checked after every step against plain lists of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from helpers import Rig, make_layer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oscarkv.cache import Step
from oscarkv.cache.paged import ROLLBACK_TOKENS
from oscarkv.kernels.rows import decode_tokens, encode_tokens
from oscarkv.recipe import Recipe

MOST_SEQUENCES = 4
counts = st.one_of(st.just(0), st.integers(1, 20), st.integers(ROLLBACK_TOKENS, 90))


@dataclass
class Model:
    """What a sequence must hold."""

    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    lossy: list[bool] = field(default_factory=list)  # exact copy may have been lost by a cut
    safe: int = 0  # cutting to this length or more loses nothing

    def copy(self) -> Model:
        return Model(self.k.copy(), self.v.copy(), self.lossy.copy(), self.safe)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        sink=st.sampled_from((0, 4, 20)),
        recent=st.sampled_from((1, 7, 16, 40)),
        page_size=st.sampled_from((16, 32)),
        sequences=st.integers(1, 2),
    )
    def start(self, sink: int, recent: int, page_size: int, sequences: int) -> None:
        recipe = Recipe(sink=sink, recent=recent)
        layer = make_layer(recipe, head_dim=16, kv_heads=1, page_size=page_size)
        self.rig = Rig(layer, sequences=sequences)
        self.layer, self.cache = layer, self.rig.cache
        self.models = [Model() for _ in range(sequences)]

    # -- operations --------------------------------------------------------------------------

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        new = [data.draw(counts) for _ in self.models]
        before = [(list(s.history), s.length) for s in self.cache._sequences]
        self.rig.record = [(torch.empty(0, 1, 16),) * 2 for _ in self.models]
        _, k, v = self.rig.tokens(sum(new))
        self.check_tables(self.rig.write(new, k, v), new)
        start = 0
        for model, count, (pages, length), sequence in zip(
            self.models, new, before, self.cache._sequences, strict=True
        ):
            model.k += k[start : start + count]
            model.v += v[start : start + count]
            model.lossy += [False] * count
            start += count
            if not count:
                assert sequence.history == pages  # untouched, shared or not
                continue
            model.safe = length if count <= ROLLBACK_TOKENS else length + count
            self.check_windows_were_dropped(sequence.windows, length)

    def check_tables(self, step: Step, new: list[int]) -> None:
        """The device has what the lists say, whatever was sent when."""
        sequences = self.cache._sequences
        for table, rows in (
            (step.history_table, [s.history for s in sequences]),
            (step.window_table, [s.windows for s in sequences]),
        ):
            width = max((len(row) for row in rows), default=0)
            assert table.tolist() == [row + [0] * (width - len(row)) for row in rows]
            assert table.dtype == torch.int32
        assert step.seq_lens.tolist() == [s.length for s in sequences]
        assert step.query_start_loc.diff().tolist() == new
        assert step.max_query_len == max(new, default=0)

    def check_windows_were_dropped(self, windows: list[int], length: int) -> None:
        """Between the sink and what a query at `length` reads, no page is held."""
        first = -(-self.cache.sink // 16)
        last = (length - self.cache.recent + 1) // 16
        assert not any(windows[first : max(first, last)])

    @precondition(lambda self: 0 < len(self.models) < MOST_SEQUENCES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.models) - 1))
        self.cache.fork(index)
        self.models.append(self.models[index].copy())

    @precondition(lambda self: len(self.models) < MOST_SEQUENCES)
    @rule()
    def add(self) -> None:
        self.cache.add()
        self.models.append(Model())

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        index = st.integers(0, len(self.models) - 1)
        order = data.draw(st.lists(index, min_size=1, max_size=MOST_SEQUENCES))
        self.cache.reorder(order)
        self.models = [self.models[i].copy() for i in order]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.models) - 1))
        self.cache.free(index)
        del self.models[index]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.models) - 1))
        model = self.models[index]
        length = data.draw(st.integers(0, len(model.k)))
        self.cache.truncate(index, length)
        if length < model.safe:
            model.lossy = [flag or j >= self.cache.sink for j, flag in enumerate(model.lossy)]
            model.safe = length
        for kept in (model.k, model.v, model.lossy):
            del kept[length:]

    # -- what must hold after every one of them ----------------------------------------------

    @invariant()
    def no_page_is_lost_or_wrongly_shared(self) -> None:
        for pool, name in (
            (self.cache.history_pages, "history"),
            (self.cache.window_pages, "windows"),
        ):
            held = Counter(p for s in self.cache._sequences for p in getattr(s, name) if p)
            assert pool.used_pages == len(held)
            assert all(pool.references(page) == count for page, count in held.items())

    @invariant()
    def pools_and_bytes_agree(self) -> None:
        layer, cache = self.layer, self.cache
        assert layer.history.shape[0] == cache.history_pages.capacity
        assert layer.window.shape[0] == cache.window_pages.capacity
        entries = sum(len(s.history) + len(s.windows) for s in cache._sequences)
        assert cache.nbytes() == layer.history.nbytes + layer.window.nbytes + 4 * entries

    @invariant()
    def history_is_what_was_appended(self) -> None:
        assert self.cache.lengths == [len(model.k) for model in self.models]
        for index, model in enumerate(self.models):
            size = self.cache.page_size
            assert len(self.cache._sequences[index].history) == -(-len(model.k) // size)
            if model.k:
                expected = encode_tokens(torch.stack(model.k), torch.stack(model.v), self.layer)
                for ours, theirs in zip(self.rig.history(index), expected, strict=True):
                    assert torch.equal(ours, theirs)

    @invariant()
    def windows_hold_what_the_next_query_reads_exactly(self) -> None:
        for model, sequence in zip(self.models, self.cache._sequences, strict=True):
            length = len(model.k)
            recent = length - self.cache.recent
            needed = [j for j in range(length) if j < self.cache.sink or j > recent]
            for j in needed:
                page = sequence.windows[j // 16]
                assert page
                k, v = self.layer.window[page, :, :, j % 16].unbind(1)
                exact = torch.equal(k, model.k[j]) and torch.equal(v, model.v[j])
                assert exact or (model.lossy[j] and self.is_packed_copy(sequence, j, k))

    def is_packed_copy(self, sequence, position: int, k: torch.Tensor) -> bool:
        page, offset = divmod(position, self.cache.page_size)
        source = sequence.history[page]
        keys, _ = decode_tokens(self.layer.history[source : source + 1], self.layer)
        return torch.equal(k, keys[offset])


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestCache = CacheMachine.TestCase
