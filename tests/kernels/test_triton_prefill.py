"""The Triton prefill against the torch backend in fp64, on the GPU or in Triton's interpreter."""

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers import Rig, make_layer, relative_error
from kernels.triton_helpers import COMPILED
from torch import Tensor

pytest.importorskip("triton")  # tests/conftest.py has chosen the interpreter where there is no GPU
import triton.language as tl

from oscarkv.cache import Step
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.kernels.triton import prefill as module
from oscarkv.kernels.triton.backend import TritonBackend
from oscarkv.kernels.triton.prefill import Tiles, prefill
from oscarkv.recipe import Recipe

SMALL = Recipe(sink=4, recent=8)
BOUND = 2e-3


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in which a short context has blocks of every kind, except where a test says no."""
    if "default_tiles" in request.fixturenames:
        return
    tiles = Tiles(32, 16, 16, 4)
    monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, tiles))
    monkeypatch.setattr(module, "WIDE_TILES", (tiles, tiles))


@pytest.fixture
def default_tiles() -> None:
    pass


# -- a step on the device, with everything it must not read made useless --------------------------


def poisoned(layer: LayerCache, step: Step, counts: list[int], strict: bool) -> LayerCache:
    """A copy whose bytes that no query of this step may read are NaN."""
    history = torch.full_like(layer.history, 0xFF)
    window = torch.full_like(layer.window, math.nan)
    sections = list(
        zip(layer.layout.sections(history), layer.layout.sections(layer.history), strict=True)
    )
    for index, (length, new) in enumerate(zip(step.seq_lens.tolist(), counts, strict=True)):
        if not new:
            continue
        begin = length - new
        j = torch.arange(length if strict else begin)[layer.sink :]
        pages = step.history_table[index][j // layer.layout.page_size].long()
        for copy, original in sections:
            offsets = j % layer.layout.page_size
            copy[pages, :, offsets] = original[pages, :, offsets]
        j = torch.arange(begin)
        j = j[(j < layer.sink) | (j > begin - layer.recent)]
        pages = step.window_table[index][j // 16].long()
        window[pages, :, :, j % 16] = layer.window[pages, :, :, j % 16]
    return replace(layer, history=history, window=window, memo={})


def moved(layer: LayerCache, device: torch.device, window_dtype: torch.dtype) -> LayerCache:
    transforms = layer.transforms
    named = {field.name: getattr(transforms, field.name) for field in fields(Transforms)}
    on_device = {name: x if x is None else x.to(device) for name, x in named.items()}
    return replace(
        layer,
        history=layer.history.to(device),
        window=layer.window.to(device, window_dtype),
        transforms=Transforms(**on_device),
        memo={},
    )


def apart(table: Tensor, device: torch.device) -> Tensor:
    """The same table with other numbers between its columns and rows."""
    rows, columns = table.shape
    wide = torch.full((2 * rows, 2 * columns + 1), -7, dtype=torch.int32, device=device)
    wide[::2, : 2 * columns : 2] = table.to(device)
    return wide[::2, : 2 * columns : 2]


def check(
    rig: Rig,
    counts: list[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    strict: bool = False,
) -> float:
    """One chunk of every sequence -> the largest relative error of a sequence."""
    q, k, v = (x.to(dtype).float() for x in rig.tokens(sum(counts)))
    step = rig.write(counts, k, v, strict=strict)
    expected = torch.full(q.shape, math.nan, dtype=torch.float64)
    rig.backend.prefill(q, k, v, rig.layer, expected)
    layer = moved(poisoned(rig.layer, step, counts, strict), device, dtype)
    out = run(layer, step, (q, k, v), max(counts), device, dtype, strict)
    starts = step.query_start_loc.tolist()
    chunks = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return max(relative_error(out[c].cpu(), expected[c]) for c in chunks)


def run(
    layer: LayerCache,
    step: Step,
    tokens: tuple[Tensor, Tensor, Tensor],
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
    strict: bool = False,
) -> Tensor:
    plan = Plan(
        step.seq_lens.to(device),
        step.query_start_loc.to(device),
        apart(step.history_table, device),
        apart(step.window_table, device),
        strict,
        longest,
    )
    q, k, v = (x.to(device, dtype) for x in tokens)
    out = torch.full(q.shape, math.nan, device=device)
    prefill(plan, q, k, v, layer, out)
    return out


def rig_with(
    history: list[int],
    recipe: Recipe = SMALL,
    *,
    group: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    **layer,
) -> Rig:
    """Sequences that already hold some tokens, written in `dtype`'s numbers."""
    rig = Rig(make_layer(recipe, **layer), group, len(history))
    _, k, v = rig.tokens(sum(history))
    rig.write(history, k.to(dtype).float(), v.to(dtype).float())
    return rig


# -- geometries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 96, COMPILED(128), 192, 256])
def test_every_head_dim(head_dim: int, device: torch.device) -> None:
    rig = rig_with([41], head_dim=head_dim, kv_heads=1)
    assert check(rig, [9], device) < BOUND


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(("head_dim", "numbers"), [(128, 32 * 128), (192, 64 * 256)])
def test_little_shared_memory(
    head_dim: int,
    numbers: int,
    folded: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last product goes through its matrix in slices, four of them."""
    monkeypatch.setattr(module, "shared_memory", lambda device: 99 * 1024)
    monkeypatch.setattr(module, "SMALL_SLICE", numbers)
    rig = Rig(make_layer(SMALL, head_dim, kv_heads=1), 2)
    if folded:
        transforms = rig.layer.transforms
        transforms.value = transforms.value_inverse = transforms.value_mean = None
    _, k, v = rig.tokens(41)
    rig.write([41], k.bfloat16().float(), v.bfloat16().float())
    assert check(rig, [9], device) < BOUND


def test_tiles_by_shared_memory() -> None:
    layout = make_layer(SMALL, 256).layout

    def tiles(dtype: torch.dtype, kib: int) -> Tiles:
        return module._tiles(256, dtype, 1000, layout, kib * 1024)

    for dtype in (torch.bfloat16, torch.float32):
        assert tiles(dtype, 227).slice == 256
        assert tiles(dtype, 163) == tiles(dtype, 99)
        assert tiles(dtype, 99).slice == 64
    assert tiles(torch.bfloat16, 99).block_m == tiles(torch.bfloat16, 227).block_m
    assert tiles(torch.float32, 99).block_m < tiles(torch.float32, 227).block_m


@pytest.mark.parametrize("head_first", [False, True])
def test_numbers_far_apart(head_first: bool) -> None:
    """Offsets of tokens or heads that int32 does not hold: indices are widened, and only there."""
    near = torch.empty(4, 2, 64, device="meta")
    far = torch.empty_strided(
        (4, 2, 64), (64, 2**30, 1) if head_first else (2**29, 64, 1), device="meta"
    )
    assert module._index_type(near, near) == tl.int32
    assert module._index_type(near, far) == tl.int64


def test_wide_indices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_index_type", lambda *tensors: tl.int64)
    assert check(rig_with([41]), [40], device) < BOUND


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_every_gqa_ratio(group: int, device: torch.device) -> None:
    assert check(rig_with([41], group=group), [11], device) < BOUND


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype, strict: bool, device: torch.device) -> None:
    rig = rig_with([50], head_dim=128, kv_heads=1, dtype=dtype)
    assert check(rig, [9], device, dtype=dtype, strict=strict) < BOUND


@pytest.mark.parametrize(
    ("bits", "parameters", "group_size"),
    [
        ((2, 2), "log8", None),
        ((2, 2), "fp16", 64),
        ((2, 2), "log8", 32),
        ((2, 2), "log8-symmetric", 16),
        ((2, 2), "log8-symmetric", 32),
        ((4, 2), "log8-symmetric", 32),
        ((3, 3), "fp16", None),
        COMPILED((3, 4), "log8", 16),
        ((4, 3), "log8-symmetric", 64),
        ((4, 4), "fp16", 32),
        ((4, 2), "log8", None),
        ((2, 4), "log8-symmetric", 16),
    ],
)
def test_bits_formats_and_groups(
    bits: tuple[int, int], parameters: str, group_size: int | None, device: torch.device
) -> None:
    recipe = SMALL.replace(
        key_bits=bits[0],
        value_bits=bits[1],
        parameters=parameters,
        group_size=group_size,
        refine_keys=group_size is None,
    )
    rig = rig_with([41], recipe, head_dim=64, kv_heads=1)
    assert check(rig, [9], device) < BOUND


@pytest.mark.parametrize(("head_dim", "bits"), [(80, 2), (80, 3), (96, 4), (192, 3)])
def test_widths_that_are_no_powers_of_two(head_dim: int, bits: int, device: torch.device) -> None:
    recipe = SMALL.replace(key_bits=bits, value_bits=bits, group_size=16, refine_keys=False)
    assert check(rig_with([41], recipe, head_dim=head_dim, kv_heads=1), [9], device) < BOUND


@pytest.mark.parametrize("page_size", [16, 64, 112])
def test_page_sizes(page_size: int, device: torch.device) -> None:
    rig = rig_with([130], page_size=page_size, kv_heads=1)
    assert check(rig, [9], device) < BOUND


def test_folded_values(device: torch.device) -> None:
    rig = Rig(make_layer(SMALL, kv_heads=1), 2)
    transforms = rig.layer.transforms
    transforms.value = transforms.value_inverse = transforms.value_mean = None
    _, k, v = rig.tokens(41)
    rig.write([41], k.bfloat16().float(), v.bfloat16().float())
    assert check(rig, [9], device) < BOUND


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_ragged_chunks(strict: bool, device: torch.device) -> None:
    """With context and without, longer and shorter than the recent window, and none at all."""
    rig = rig_with([40, 0, 23, 30, 1], kv_heads=1)
    assert check(rig, [5, 19, 0, 26, 1], device, strict=strict) < BOUND


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 40), (64, 4), (20, 17)])
@pytest.mark.parametrize("strict", [False, True])
def test_window_sizes(sink: int, recent: int, strict: bool, device: torch.device) -> None:
    rig = rig_with([37, 5], Recipe(sink=sink, recent=recent), kv_heads=1)
    assert check(rig, [20, 9], device, strict=strict) < BOUND


@pytest.mark.parametrize("window", [1, 6, 20, 200])
@pytest.mark.parametrize("strict", [False, True])
def test_a_sliding_window(window: int, strict: bool, device: torch.device) -> None:
    rig = rig_with([50], sliding_window=window, kv_heads=1)
    assert check(rig, [21], device, strict=strict) < BOUND


def test_a_soft_cap(device: torch.device) -> None:
    assert check(rig_with([41], soft_cap=2.0, kv_heads=1), [19], device) < BOUND


@pytest.mark.parametrize(("keys", "values"), [(1e-3, 1e-3), (3e2, 1e3)])
def test_small_and_large_numbers(keys: float, values: float, device: torch.device) -> None:
    """Where scales, weights or codes times them would leave the range of fp16 without care."""
    rig = Rig(make_layer(SMALL, head_dim=128, kv_heads=1), 2)
    layer = rig.layer
    layer.transforms.key_mean *= keys
    layer.transforms.value_mean *= values
    layer.scale /= keys
    plain = rig.tokens

    def scaled(count: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = plain(count)
        return q, k * keys, v * values

    rig.tokens = scaled  # type: ignore[method-assign]
    _, k, v = rig.tokens(41)
    rig.write([41], k.bfloat16().float(), v.bfloat16().float())
    assert check(rig, [9], device) < BOUND


@pytest.mark.usefixtures("default_tiles")
@pytest.mark.parametrize(
    ("page_size", "strict"), [COMPILED(64, False), (64, True), (112, False), COMPILED(112, True)]
)
def test_tiles_as_they_are_used(page_size: int, strict: bool, device: torch.device) -> None:
    rig = rig_with(
        [700, 100], Recipe(sink=64, recent=256), head_dim=128, kv_heads=1, page_size=page_size
    )
    assert check(rig, [150, 3], device, strict=strict) < BOUND


@pytest.mark.usefixtures("default_tiles")
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        COMPILED(64, torch.float32),
        COMPILED(64, torch.float16),
        COMPILED(128, torch.float32),
        COMPILED(128, torch.float16),
        (256, torch.float32),  # the backend has torch do these: see the next test
    ],
)
def test_tiles_of_three_bits(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    recipe = Recipe(
        key_bits=3, value_bits=3, sink=64, recent=256, parameters="log8-symmetric", key_gain=1.0
    )
    rig = rig_with([700, 100], recipe, head_dim=head_dim, kv_heads=1, page_size=112, dtype=dtype)
    assert check(rig, [150, 3], device, dtype=dtype, strict=True) < BOUND


@pytest.mark.parametrize(("head_dim", "bits"), [(256, 3), COMPILED(192, 3), (128, 3), (256, 4)])
def test_wide_rows_of_three_bits_are_read_by_torch(
    head_dim: int, bits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch = []
    plain = TorchBackend.prefill

    def counted(self: TorchBackend, *arguments: Any) -> None:
        by_torch.append(self)
        plain(self, *arguments)

    recipe = SMALL.replace(key_bits=bits, value_bits=bits, refine_keys=False)
    rig = rig_with([41], recipe, head_dim=head_dim, kv_heads=1)
    q, k, v = (x.bfloat16().float() for x in rig.tokens(9))
    step = rig.write([9], k, v)
    expected = torch.empty(q.shape, dtype=torch.float64)
    rig.backend.prefill(q, k, v, rig.layer, expected)
    layer = moved(rig.layer, device, torch.bfloat16)
    monkeypatch.setattr(TorchBackend, "prefill", counted)
    backend = TritonBackend()
    tables = (step.seq_lens, step.query_start_loc, step.history_table, step.window_table)
    backend.plan(*(x.to(device) for x in tables))
    tokens = [x.to(device, torch.bfloat16) for x in (q, k, v)]
    out = torch.full(q.shape, math.nan, device=device)
    backend.prefill(*tokens, layer, out)
    assert bool(by_torch) == (bits == 3 and head_dim > 128)
    assert relative_error(out.cpu(), expected) < BOUND


# -- the call --------------------------------------------------------------------------------------


def test_twice_the_same(device: torch.device) -> None:
    rig = rig_with([41, 20])
    tokens = rig.tokens(12)
    step = rig.write([9, 3], tokens[1], tokens[2])
    layer = moved(rig.layer, device, torch.bfloat16)
    first, second = (run(layer, step, tokens, 9, device, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)


def test_strided_tensors_and_a_generous_plan(device: torch.device) -> None:
    """q, k, v cut from one tensor, as a fused projection gives them; out in the queries' type."""
    rig = rig_with([41])
    q, k, v = (x.bfloat16().float() for x in rig.tokens(9))
    step = rig.write([9], k, v)
    expected = torch.empty(q.shape, dtype=torch.float64)
    rig.backend.prefill(q, k, v, rig.layer, expected)
    layer = moved(rig.layer, device, torch.bfloat16)
    fused = torch.cat([q, k, v], 1).to(device, torch.bfloat16)
    tables = (step.history_table.to(device), step.window_table.to(device))
    plan = Plan(step.seq_lens.to(device), step.query_start_loc.to(device), *tables, False, 100)
    out = torch.zeros(9, 4, 128, device=device, dtype=torch.bfloat16)[..., ::2]
    prefill(plan, fused[:, :4], fused[:, 4:6], fused[:, 6:], layer, out)
    assert relative_error(out.cpu(), expected) < 2 * BOUND


def test_a_step_without_tokens(device: torch.device) -> None:
    rig = rig_with([41])
    layer = moved(rig.layer, device, torch.bfloat16)
    empty = torch.empty(0, 4, 64)
    step = rig.cache.append([0])
    assert (
        run(layer, step, (empty, empty[:, :2], empty[:, :2]), 0, device, torch.bfloat16).numel()
        == 0
    )
