"""The paged cache, case by case: limits, sharing, cutting back, memory."""

from __future__ import annotations

import array
import copy
import time

import pytest
import torch
from helpers import Rig, make_layer

from oscarkv.cache import PagedCache, paged
from oscarkv.errors import CacheError
from oscarkv.kernels.rows import decode_tokens
from oscarkv.recipe import Recipe

RECIPE = Recipe(sink=4, recent=8)


def rig(recipe: Recipe = RECIPE, sequences: int = 1, **layer) -> Rig:
    return Rig(make_layer(recipe, 32, 1, **layer), group=2, sequences=sequences)


def state(cache: PagedCache) -> tuple:
    pools = [(p._references, sorted(p._free)) for p in (cache.history_pages, cache.window_pages)]
    stored = [layer.history.numpy().tobytes() for layer in cache.layers]
    return copy.deepcopy((cache._sequences, pools, stored))


def held_windows(cache: PagedCache, index: int = 0) -> list[int]:
    return [w for w, page in enumerate(cache._sequences[index].windows) if page]


# -- limits --------------------------------------------------------------------------------------


def test_exactly_max_pages_can_be_used() -> None:
    one = rig(sequences=2)
    one.cache.max_pages = 3
    one.run([32, 0], "prefill")
    one.run([0, 16], "prefill")
    assert one.cache.history_pages.used_pages == 3
    assert one.layer.history.shape[0] == 4  # and page 0


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    one = rig(sequences=2)
    one.cache.max_pages = 4
    one.run([30, 17], "prefill")
    before = state(one.cache)
    with pytest.raises(CacheError, match=r"full: 4 of 4 history pages in use, 2 more needed; free"):
        one.cache.append([3, 16])
    assert state(one.cache) == before
    assert one.check([2, 1], "decode") < 1e-9  # what fits still works
    one.cache.free(1)
    del one.record[1]
    assert one.check([20], "prefill") < 1e-9


def test_a_copy_on_write_counts_towards_max_pages() -> None:
    one = rig()
    one.cache.max_pages = 1
    one.run([10], "prefill")
    one.cache.fork(0)
    with pytest.raises(CacheError, match="1 more needed"):
        one.cache.append([0, 1])
    one.cache.free(0)
    one.cache.append([1])  # the last holder writes on in place


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], []])
def test_append_wants_a_count_for_each_sequence(counts: list[int]) -> None:
    with pytest.raises(CacheError, match=f"{len(counts)} counts for 2 sequences"):
        rig(sequences=2).cache.append(counts)


def test_negative_counts_and_lengths_are_refused() -> None:
    one = rig()
    one.run([5], "prefill")
    before = state(one.cache)
    with pytest.raises(CacheError, match="cannot append -1"):
        one.cache.append([-1])
    for length in (-1, 6):
        with pytest.raises(CacheError, match="sequence 0 has 5 tokens"):
            one.cache.truncate(0, length)
    assert state(one.cache) == before


# -- the step ------------------------------------------------------------------------------------


def test_a_step_says_where_everything_is() -> None:
    one = rig(sequences=3)
    one.run([18, 0, 3], "prefill")
    step = one.cache.append([1, 2, 0])
    assert step.seq_lens.tolist() == [19, 2, 3]
    assert step.query_start_loc.tolist() == [0, 1, 3, 3]
    assert step.history_table.tolist() == [[1, 2], [4, 0], [3, 0]]
    assert step.history_slots.tolist() == [2 * 16 + 2, 4 * 16, 4 * 16 + 1]
    assert step.window_table.shape == (3, 2)
    pages = step.window_table
    assert step.window_slots.tolist() == [
        int(p) * 16 + o for p, o in ((pages[0, 1], 2), (pages[1, 0], 0), (pages[1, 0], 1))
    ]
    for tensor in (step.seq_lens, step.query_start_loc, step.history_table, step.window_table):
        assert tensor.dtype == torch.int32
    assert step.history_slots.dtype == step.window_slots.dtype == torch.int64


def test_without_history_only_windows_are_kept() -> None:
    layer = make_layer(RECIPE, 32, 1)
    cache = PagedCache([layer], sink=0, recent=1 << 40, page_size=16, keep_history=False)
    cache.add()
    step = cache.append([200])
    assert step.history_slots.tolist() == [-1] * 200
    assert (step.window_slots >= 16).all()
    assert layer.history.shape[0] == 1
    cache.truncate(0, 20)
    assert cache.window_pages.used_pages == 2
    cache.append([1])


def count_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy to the device from here on."""
    sent: list[int] = []
    send = paged._send

    def counted(device: torch.device, *parts: array.array[int]) -> list[torch.Tensor]:
        sent.append(sum(part.itemsize * len(part) for part in parts))
        made = send(device, *parts)
        assert all(tensor.data_ptr() % 16 == made[0].data_ptr() % 16 for tensor in made)
        return made

    monkeypatch.setattr(paged, "_send", counted)
    return sent


def test_single_tokens_send_their_numbers_and_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(Recipe(sink=16, recent=32), sequences=2)
    one.run([600, 500], "prefill")
    one.cache.append([1, 1])
    sent = count_sent(monkeypatch)
    first = one.cache.append([1, 1])
    for _ in range(40):  # window pages come and go, history pages come
        step = one.cache.append([1, 1])
    assert sent == [2 * 2 * 8 + 2 * 4 + 3 * 4] * 41
    assert step.window_table.data_ptr() == first.window_table.data_ptr()
    assert step.history_table.data_ptr() == first.history_table.data_ptr()
    rows = [sequence.windows for sequence in one.cache._sequences]
    width = len(rows[0])
    assert step.window_table.tolist() == [row + [0] * (width - len(row)) for row in rows]


def test_a_chunk_sends_only_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    one.run([2000], "prefill")  # tables have room for more
    one.cache.append([1])
    sent = count_sent(monkeypatch)
    step = one.cache.append([160])
    assert step.history_table.tolist() == [one.cache._sequences[0].history]
    assert step.window_table.tolist() == [one.cache._sequences[0].windows]
    assert sent[1:] == [12 * 10]  # ten history pages, and where they go; few windows


def test_tables_outlive_inference_mode() -> None:
    one = rig()
    with torch.inference_mode():
        one.cache.append([70])
    for _ in range(40):
        step = one.cache.append([1])
    assert step.history_table.tolist() == [one.cache._sequences[0].history]


def test_pools_outlive_inference_mode() -> None:
    one = rig()
    with torch.inference_mode():
        one.cache.append([60])  # both pools grow
    assert not one.layer.history.is_inference()
    assert not one.layer.window.is_inference()
    pages = one.layer.window.shape[0]
    with torch.inference_mode():
        one.cache.append([100])
        one.cache.trim()
    assert one.layer.window.shape[0] < pages  # made anew
    assert not one.layer.window.is_inference()


def test_a_step_takes_as_long_at_128k_as_at_1k() -> None:
    """Of Python's time. Interleaved, so that whatever else the machine does hits both."""

    def cache_of(chunks: int, tokens: int) -> PagedCache:
        layer = make_layer(Recipe(), 16, 1, 64)
        cache = PagedCache([layer], sink=64, recent=256, page_size=64)
        cache.add()
        for _ in range(chunks):
            cache.append([tokens])
            cache.trim()
        return cache

    caches = cache_of(1, 1024), cache_of(16, 8192)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(200):
        for cache, spent in zip(caches, times, strict=True):
            start = time.perf_counter()
            cache.append([1])
            cache.trim()
            spent.append(time.perf_counter() - start)
    short, long = (sorted(spent)[20] for spent in times)
    print(f"\nappend: {1e6 * short:.0f} us at 1K, {1e6 * long:.0f} us at 128K")
    assert long < 3 * short


# -- sharing -------------------------------------------------------------------------------------


def test_forks_share_until_they_write_and_then_differ() -> None:
    one = rig()
    one.run([24], "prefill")
    one.cache.fork(0)
    one.record.append(one.record[0])
    assert one.cache.history_pages.used_pages == 2
    assert one.check([1, 1], "decode") < 1e-9
    first, second = (s.history for s in one.cache._sequences)
    assert first[0] == second[0]  # the full page is still shared
    assert first[1] != second[1]
    assert one.cache.history_pages.used_pages == 3
    for mine, theirs in zip(one.history(0), one.history(1), strict=True):
        assert torch.equal(mine[:24], theirs[:24])
    assert any(
        not torch.equal(mine[24], theirs[24])
        for mine, theirs in zip(one.history(0), one.history(1), strict=True)
    )


def test_sequences_that_get_no_token_are_not_copied() -> None:
    one = rig()
    one.run([24], "prefill")
    for _ in range(3):
        one.cache.fork(0)
    one.record *= 4
    one.run([0, 0, 0, 1], "decode")
    assert one.cache.history_pages.used_pages == 3
    assert one.cache.window_pages.used_pages == 3
    histories = [s.history for s in one.cache._sequences]
    assert histories[0] == histories[1] == histories[2] != histories[3]


def test_reorder_keeps_the_named_and_frees_the_rest() -> None:
    one = rig(sequences=3)
    one.run([20, 33, 5], "prefill")
    one.cache.reorder([1, 1])
    one.record = [one.record[1]] * 2
    assert one.cache.lengths == [33, 33]
    assert one.cache.history_pages.used_pages == 3
    assert one.check([1, 2], "decode") < 1e-9
    one.cache.reorder([])
    assert one.cache.history_pages.used_pages == one.cache.window_pages.used_pages == 0


# -- windows -------------------------------------------------------------------------------------


def test_windows_before_a_long_chunk_are_dropped_after_it() -> None:
    one = rig(Recipe(sink=16, recent=32))
    for count in (100, 100, 100, 1):  # longer than the rollback limit: gaps between the windows
        one.run([count], "prefill")
    # sink page 0; a query at 300 reads from position 269 on, in page 16
    assert held_windows(one.cache) == [0, 16, 17, 18]


def test_windows_do_not_grow_while_decoding() -> None:
    one = rig(Recipe(sink=4, recent=32))
    for _ in range(150):
        one.run([1], "decode")
        assert len(held_windows(one.cache)) <= 1 + 4
    assert one.layer.window.shape[0] <= 8


@pytest.mark.parametrize("rolled_back", [1, 7, 40, 64])
def test_a_speculative_step_is_rolled_back_without_loss(rolled_back: int) -> None:
    one = rig()
    one.run([90], "prefill")
    kept = one.record[0]
    one.run([64], "prefill")
    k, v = one.record[0]
    length = 154 - rolled_back
    one.cache.truncate(0, length)
    one.record[0] = (k[:length], v[:length])
    assert one.check([1], "decode") < 1e-9
    assert kept[0].shape[0] == 90


def test_cutting_into_a_long_chunk_fills_windows_from_the_history() -> None:
    one = rig(Recipe(sink=4, recent=20))
    one.run([200], "prefill")
    one.cache.truncate(0, 120)
    sequence = one.cache._sequences[0]
    assert held_windows(one.cache) == [0, 6, 7]  # position 101 on
    keys, values = decode_tokens(
        one.layer.history[sequence.history[6] : sequence.history[6] + 1], one.layer
    )
    stored = one.layer.window[sequence.windows[6]]  # [H, 2, 16, d]
    assert torch.equal(stored[:, 0], keys.transpose(0, 1))
    assert torch.equal(stored[:, 1], values.transpose(0, 1))
    k, _ = one.record[0]
    assert torch.equal(one.layer.window[sequence.windows[0], :, 0, :4], k[:4].transpose(0, 1))
    q, new_k, new_v = one.tokens(1)
    _, out = one.run([1], "decode", (q, new_k, new_v))
    assert bool(torch.isfinite(out).all())


# -- memory --------------------------------------------------------------------------------------


def test_pools_have_little_slack_and_bytes_are_counted() -> None:
    one = rig(page_size=16)
    for _ in range(40):
        one.run([16], "prefill")
    cache, layer = one.cache, one.layer
    assert cache.history_pages.used_pages == 40
    assert layer.history.shape[0] <= 41 * 17 // 16 + 1
    tables = 4 * (40 + 40)
    assert cache.nbytes() == layer.history.nbytes + layer.window.nbytes + tables


def test_freed_pages_are_used_again() -> None:
    one = rig(sequences=2)
    one.run([64, 64], "prefill")
    size = one.cache.nbytes()
    for _ in range(5):
        one.cache.free(0)
        one.cache.add()
        one.record = [one.record[1], (torch.empty(0, 1, 32),) * 2]
        assert one.check([0, 64], "prefill") < 1e-9
    assert one.cache.nbytes() == size
