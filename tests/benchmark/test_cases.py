"""The table of cases: it covers what the targets speak of, and counts bytes right."""

from dataclasses import replace

import pytest
import torch

from oscarkv.benchmark.cases import Case, cpu_cases, gpu_cases
from oscarkv.benchmark.run import choose_cases
from oscarkv.benchmark.timing import MOST_SETS, sets_needed
from oscarkv.errors import OscarError
from oscarkv.recipe import Recipe

NAMES = [case.name for case in gpu_cases()]
BY_NAME = dict(zip(NAMES, gpu_cases(), strict=True))

#: Every row of the table of targets.
TARGETS = [
    "decode 32/8/128 1x131072",
    "decode 32/8/128 8x32768",
    "decode 32/8/128 32x8192",
    "decode 32/8/128 32x32768",
    "decode 64/8/128 32x32768",
    "decode 12/2/128 32x32768",
    "decode 32/8/64 32x32768",
    "decode 32/8/256 32x32768",
    "decode 32/8/128 64x1024",
    "write 32/8/128 256x1",
    "write 32/8/128 1x8192",
    "prefill 32/8/128 8192 over 32768",
]


def test_every_target_is_a_case() -> None:
    assert set(TARGETS) <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    quick = {case.name for case in gpu_cases() if case.quick}
    assert set(TARGETS[:4]) | {"write 32/8/128 256x1"} <= quick
    # What has no BF16 kernel to compare with says why.
    assert all(case.dense for case in gpu_cases() if case.kind == "write")
    assert not any(case.dense for case in gpu_cases() if case.name in TARGETS[:9])


def test_other_things_that_cost_time_are_cases() -> None:
    variants = ("4 query tokens", "page size 16", "page size 112", "values folded", "ragged")
    for part in (*variants, "256x4096", "1x4096", "1x1", "8192 over 0", "2048 over 131072"):
        assert [name for name in NAMES if part in name], part
    ragged = BY_NAME["decode 32/8/128 32xragged, 1K to 64K"]
    assert len(ragged.lengths) == 32
    assert min(ragged.lengths) >= 1024
    assert max(ragged.lengths) <= 65536
    assert max(ragged.lengths) > 8 * min(ragged.lengths)


@pytest.mark.parametrize(
    ("name", "floor", "gain"),
    [(TARGETS[0], 0.0168, 8.3), (TARGETS[1], 0.0336, 7.6), (TARGETS[3], 0.1342, 7.1)],
)
def test_bytes_are_those_of_the_design(name: str, floor: float, gain: float) -> None:
    """The design's floors leave the windows out: 320 exact rows in place of packed ones."""
    case = replace(BY_NAME[name], recipe=Recipe.named("uniform"))  # the design's rows
    bare = sum(case.lengths) * case.packed_bytes_per_token
    assert bare / 4.5e9 == pytest.approx(floor, rel=0.01)
    extra = len(case.lengths) * 320 * (case.exact_bytes_per_token - case.packed_bytes_per_token)
    queries = 2 * 2 * len(case.lengths) * 32 * 128
    assert case.bytes == bare + extra + queries
    assert case.dense_bytes / case.bytes < gain


def test_bytes_of_short_sequences_and_chunks() -> None:
    shape = (4, 2, 64)
    exact, queries = 2 * 2 * 64 * 2, 2 * 2 * 4 * 64
    packed = 2 * (16 + 16 + 1 + 1)
    for length in (1, 40, 100, 320):  # all in the windows
        assert Case("decode", shape, (length,)).bytes == length * exact + queries
    assert Case("decode", shape, (321,)).bytes == 320 * exact + packed + queries
    # Four queries: the oldest reads three more exactly, which the newest reads packed.
    assert Case("decode", shape, (400,), 4).bytes == 323 * exact + 80 * packed + 4 * queries
    assert Case("prefill", shape, (100,), 100).bytes == 100 * (exact + queries)
    chunk = Case("prefill", shape, (1000,), 500).bytes
    # The first query reads 64 + 255 rows exactly from before the chunk; later ones 436 packed.
    assert chunk == 500 * (exact + queries) + (64 + 255) * exact + 436 * packed
    assert Case("write", shape, (9, 9)).bytes == 2 * (2 * exact + packed)
    assert Case("write", shape, (500,), 500).bytes == 500 * (exact + packed) + 320 * exact


def test_only_filters_by_name() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [c.name for c in choose_cases(gpu, only="page size 16")] == [
        "decode 32/8/128 32x32768, page size 16"
    ]
    assert {c.kind for c in choose_cases(gpu, only="write")} == {"write"}
    assert len(choose_cases(gpu, quick=True)) < len(choose_cases(gpu)) == len(NAMES)
    assert choose_cases(cpu, quick=True) == cpu_cases()
    with pytest.raises(OscarError, match="no case has 'nonsense' in its name; there are: decode"):
        choose_cases(gpu, only="nonsense")


def test_small_cases_are_the_same_kernel() -> None:
    for case in gpu_cases():
        small = case.small()
        assert (small.kind, small.shape, small.page_size) == (case.kind, case.shape, case.page_size)
        assert small.folded == case.folded
        assert sum(small.lengths) <= 4096
        assert all(length >= small.new for length in small.lengths)
        assert (small.new == small.lengths[0]) == (case.new == case.lengths[0])


def test_buffers_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    megabyte = 1 << 20
    device = torch.device("cuda", 0)
    monkeypatch.setattr("oscarkv.benchmark.timing.cache_bytes", lambda device: 50 * megabyte)
    assert sets_needed(600 * megabyte, device) == 1
    assert sets_needed(40 * megabyte, device) == 4
    assert sets_needed(100, device) == MOST_SETS
    for case in gpu_cases():
        touched = sets_needed(case.touched_bytes, device) * case.touched_bytes
        assert touched > 140 * megabyte or case.name == "write 32/8/128 1x1"
