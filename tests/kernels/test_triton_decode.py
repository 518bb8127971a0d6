"""Triton decode against the oracle in fp64, over geometries and kinds of batch."""

from dataclasses import replace

import pytest
import torch
from helpers import Rig, make_layer, relative_error
from kernels.triton_helpers import COMPILED, moved

from oscarkv.errors import CacheError
from oscarkv.kernels import LayerCache
from oscarkv.recipe import Recipe

pytest.importorskip("triton")
from oscarkv.kernels.triton import decode as triton_decode
from oscarkv.kernels.triton import unusable_reason
from oscarkv.kernels.triton.backend import TritonBackend

SMALL = Recipe(sink=4, recent=8)
BOUND = 1e-3 if torch.cuda.is_available() else 1e-4  # matrix units have 11 bits, and add otherwise
GROUPED_BOUND = 2e-3  # with several groups, numbers have 11 bits


@pytest.fixture(autouse=True)
def several_small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = replace(triton_decode.TUNING, block=32, split_tokens=16, programs_per_sm=8)
    monkeypatch.setattr(triton_decode, "TUNING", tuning)
    monkeypatch.setattr(triton_decode, "multiprocessors", lambda device: 2)


def rig(recipe: Recipe = SMALL, *, group: int = 2, sequences: int = 1, **layer) -> Rig:
    layer.setdefault("head_dim", 64)
    return Rig(make_layer(recipe, **layer), group, sequences)


def poisoned(layer: LayerCache, step) -> LayerCache:
    """The layer with NaN (0xFF) in everything no sequence of the step owns."""
    layer = replace(layer, history=layer.history.clone(), window=layer.window.clone())
    size, lengths = layer.layout.page_size, step.seq_lens.tolist()
    pages = torch.zeros(layer.history.shape[0], size, dtype=torch.bool)
    windows = torch.zeros(layer.window.shape[0], 16, dtype=torch.bool)
    for i, length in enumerate(lengths):
        j = torch.arange(length)
        pages[step.history_table[i][j // size].long(), j % size] = True
        windows[step.window_table[i][j // 16].long(), j % 16] = True
    windows[0] = False
    for section in layer.layout.sections(layer.history):
        section.transpose(1, 2)[~pages] = 0xFF
    layer.window.view(torch.uint8).permute(0, 3, 1, 2, 4)[~windows] = 0xFF
    return layer


def error(
    one: Rig,
    counts: list[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    max_query_len: int | None = None,
) -> float:
    """One step: the largest relative error of a sequence, with all that is not its own NaN."""
    q, k, v = one.tokens(sum(counts))
    q = (q * scale).to(dtype)
    step = one.write(counts, k, v)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    one.backend.decode(q.float(), one.layer, expected)
    layer = moved(poisoned(one.layer, step), device)
    tables = (step.seq_lens, step.query_start_loc, step.history_table, step.window_table)
    backend = TritonBackend()
    backend.plan(*(x.to(device) for x in tables), max_query_len=max_query_len)
    out = torch.full(q.shape, torch.nan, device=device)
    backend.decode(q.to(device), layer, out)
    parts = zip(out.cpu().split(counts), expected.split(counts), strict=True)
    return max(relative_error(a, b) for a, b in parts)


# -- geometries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, COMPILED(80), 96, COMPILED(128), 192, 256])
def test_every_head_dim(head_dim: int, device: torch.device) -> None:
    one = rig(head_dim=head_dim, kv_heads=1)
    one.write([60], *one.tokens(60)[1:])
    assert error(one, [1], device) < BOUND


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_registers_are_limited_only_by_nvidia(
    hip: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton knows no such option for AMD."""
    kernel, options = triton_decode._attend, {}

    class Launch:
        def __getitem__(self, grid):
            def launch(*arguments, **named):
                options.update(named)
                kernel[grid](*arguments, **named)

            return launch

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(triton_decode, "_attend", Launch())
    one = rig(kv_heads=1)
    one.write([40], *one.tokens(40)[1:])
    assert error(one, [1], device) < BOUND
    assert options.get("maxnreg") == (168 if hip is None else None)


@pytest.mark.parametrize("group", [1, 3, 4, 6, 7, 12, 16])
def test_every_gqa_ratio(group: int, device: torch.device) -> None:
    one = rig(group=group, kv_heads=2)
    one.write([40], *one.tokens(40)[1:])
    assert error(one, [1], device) < BOUND


@pytest.mark.parametrize(
    ("bits", "parameters", "group_size"),
    [
        ((2, 2), "fp16", None),
        ((2, 4), "log8", None),
        ((3, 3), "log8-symmetric", None),
        ((4, 3), "fp16", None),
        ((2, 2), "log8-symmetric", 64),
        COMPILED((3, 2), "log8", 32),
        ((4, 4), "fp16", 64),
    ],
)
def test_bits_formats_and_groups(bits, parameters, group_size, device: torch.device) -> None:
    knobs = {"key_bits": bits[0], "value_bits": bits[1], "parameters": parameters}
    recipe = SMALL.replace(**knobs, group_size=group_size, refine_keys=group_size is None)
    one = rig(recipe, head_dim=128, kv_heads=1)
    one.write([50], *one.tokens(50)[1:])
    assert error(one, [1], device) < (BOUND if group_size is None else GROUPED_BOUND)


@pytest.mark.parametrize("head_dim", [64, 96, COMPILED(128)])
def test_keys_with_split_scales(head_dim: int, device: torch.device) -> None:
    recipe = SMALL.replace(parameters="log8-symmetric", split_scales=True)
    one = rig(recipe, head_dim=head_dim, kv_heads=1)
    one.write([50], *one.tokens(50)[1:])
    assert error(one, [1], device) < GROUPED_BOUND


@pytest.mark.parametrize(("head_dim", "group_size"), [(80, 16), (96, 32), (192, 64)])
def test_groups_that_are_no_power_of_two(head_dim, group_size, device: torch.device) -> None:
    recipe = SMALL.replace(group_size=group_size, refine_keys=False)
    one = rig(recipe, head_dim=head_dim, kv_heads=1)
    one.write([50], *one.tokens(50)[1:])
    assert error(one, [2], device) < GROUPED_BOUND


@pytest.mark.parametrize("window_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_queries_and_windows(dtype, window_dtype, device: torch.device) -> None:
    layer = make_layer(SMALL)
    layer.window = layer.window.to(window_dtype)
    one = Rig(layer, 2)
    one.write([40], *one.tokens(40)[1:])
    bound = max(BOUND, 5e-4) if window_dtype == torch.float16 else BOUND  # 11 bits of each weight
    assert error(one, [1], device, dtype=dtype) < bound


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 32, COMPILED(112)])
def test_ragged_batches_at_page_borders(page_size: int, device: torch.device) -> None:
    lengths = [page_size - 1, page_size, page_size + 1, 1, 2 * page_size + 3]
    one = rig(sequences=len(lengths), page_size=page_size, kv_heads=1)
    one.write(lengths, *one.tokens(sum(lengths))[1:])
    assert error(one, [1] * len(lengths), device, max_query_len=1) < BOUND


def test_from_an_empty_history_on(device: torch.device) -> None:
    one = rig(Recipe(sink=2, recent=3), sequences=2, kv_heads=1)
    for _ in range(8):
        assert error(one, [1, 1], device) < BOUND


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (64, 40), (20, 17), (4, 16)])
def test_window_sizes(sink: int, recent: int, device: torch.device) -> None:
    one = rig(Recipe(sink=sink, recent=recent), sequences=2, kv_heads=1)
    one.write([70, 5], *one.tokens(75)[1:])
    assert error(one, [1, 3], device) < BOUND


@pytest.mark.parametrize("counts", [COMPILED([1, 8, 3]), [5, 1, 0], [0, 0, 1]])
def test_several_tokens_and_padding(counts: list[int], device: torch.device) -> None:
    one = rig(sequences=3, group=3, kv_heads=1)
    one.write([50, 9, 37], *one.tokens(96)[1:])
    assert error(one, counts, device, max_query_len=8) < BOUND


def test_a_soft_cap(device: torch.device) -> None:
    one = rig(soft_cap=2.0, kv_heads=1)
    one.write([50], *one.tokens(50)[1:])
    assert error(one, [2], device) < BOUND


@pytest.mark.parametrize("window", [1, 5, 20, 100])
def test_a_sliding_window(window: int, device: torch.device) -> None:
    one = rig(sliding_window=window, sequences=2, kv_heads=1)
    one.write([90, 7], *one.tokens(97)[1:])
    assert error(one, [3, 1], device) < BOUND


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_tiny_and_huge_queries(scale: float, device: torch.device) -> None:
    one = rig(kv_heads=1)
    one.layer.scale /= scale
    one.write([60], *one.tokens(60)[1:])
    assert error(one, [1], device, scale=scale) < BOUND


@pytest.mark.parametrize("size", [1e-3, 3e3])
def test_values_with_outliers_of_any_size(size: float, device: torch.device) -> None:
    """p s would leave the range of fp16."""
    one = rig(SMALL.replace(parameters="fp16"), head_dim=128, kv_heads=1)
    _, k, v = one.tokens(80)
    v *= size
    v[::7] *= 50
    k[:, :, 5] *= 30
    one.write([80], k, v)
    assert error(one, [2], device) < BOUND


def test_folded_values(device: torch.device) -> None:
    one = rig(kv_heads=1)
    transforms = one.layer.transforms
    transforms.value = transforms.value_inverse = transforms.value_mean = None
    one.write([60], *one.tokens(60)[1:])
    assert error(one, [1], device) < BOUND


def test_strided_tables_queries_and_outputs(device: torch.device) -> None:
    one = rig(sequences=2, kv_heads=2, page_size=32)
    one.write([70, 33], *one.tokens(103)[1:])
    q, k, v = one.tokens(2)
    step = one.write([1, 1], k, v)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    one.backend.decode(q, one.layer, expected)
    tables = [
        torch.stack([x, torch.full_like(x, 1 << 20)], -1).mT.contiguous().mT[..., 0]
        for x in (step.history_table, step.window_table)
    ]
    wide_q, wide_out = torch.zeros(2, 2, 4, 100), torch.zeros(2, 2, 6, 80)
    wide_q[:, 1, :, :64] = q
    wide_q, wide_out = wide_q.to(device), wide_out.to(device)
    backend = TritonBackend()
    tensors = (step.seq_lens, step.query_start_loc, *tables)
    backend.plan(*(x.to(device) for x in tensors), max_query_len=1)
    backend.decode(wide_q[:, 1, :, :64], moved(one.layer, device), wide_out[:, 1, 1:5, 8:72])
    assert relative_error(wide_out[:, 1, 1:5, 8:72].cpu(), expected) < BOUND
    wide_out[:, 1, 1:5, 8:72] = 0
    assert not bool(wide_out.any())


def test_two_runs_give_the_same_bits(device: torch.device) -> None:
    one = rig(sequences=2)
    q, k, v = one.tokens(90)
    step = one.write([60, 30], k, v)
    layer, backend = moved(one.layer, device), TritonBackend()
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    backend.plan(
        step.seq_lens.to(device), starts, step.history_table.to(device),
        step.window_table.to(device), max_query_len=1,
    )  # fmt: skip
    outs = [torch.zeros(2, *q.shape[1:], device=device) for _ in range(2)]
    for out in outs:
        backend.decode(q[:2].to(device), layer, out)
    assert torch.equal(*outs)


# -- the interface -------------------------------------------------------------------------------


def test_a_plan_must_fit_its_batch(device: torch.device) -> None:
    backend, table = TritonBackend(), torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(CacheError, match="plan"):
        backend.decode(table, make_layer(SMALL), table)
    three = torch.tensor([0, 1, 2], device=device)
    with pytest.raises(CacheError, match="one entry more"):
        backend.plan(three[:1], three, table, table)


def test_it_says_why_it_cannot_run() -> None:
    reason = unusable_reason()
    assert (reason is None) == torch.cuda.is_available()
