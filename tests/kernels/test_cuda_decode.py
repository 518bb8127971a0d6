"""The CUDA decode kernel against the oracle in fp64 (compiled: make test-gpu; else emulated).

What a kernel must not read is NaN, and what it must not write is checked: see `steps.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import generator
from kernels.cuda_helpers import BF16, HALF, PLAIN, named
from kernels.steps import BOUNDS, Guarded, Shape, make_step

pytest.importorskip("cuda.core")
pytest.importorskip("triton")
from oscarkv.kernels.cuda import decode
from oscarkv.kernels.cuda.backend import CudaBackend

pytestmark = pytest.mark.compiled


# -- decode: geometries --------------------------------------------------------------------------

#: head_dim, group size, parameters, page size, type, GQA ratio; new tokens. Each is a variant.
GRID = [
    (Shape(128, None, "fp16", 64, BF16, 4), 1),
    (Shape(128, None, "fp16", 64, BF16, 8), 1),
    (Shape(128, None, "log8", 16, HALF, 1), 1),
    (Shape(128, 64, "fp16", 48, BF16, 2), 3),
    (Shape(128, 32, "log8", 112, HALF, 3), 2),
    (Shape(128, 64, "log8-symmetric", 128, BF16, 16), 1),
    (Shape(128, None, "log8-symmetric", 256, HALF, 7), 8),
    (Shape(64, None, "log8", 64, BF16, 3), 1),
    (Shape(64, 32, "fp16", 128, HALF, 5), 4),
    (Shape(64, 32, "log8-symmetric", 16, BF16, 12), 2),
    (Shape(64, None, "fp16", 256, HALF, 6), 1),
    (Shape(256, None, "fp16", 64, BF16, 4), 1),
    (Shape(256, 64, "log8", 48, HALF, 2), 5),
    (Shape(256, 32, "fp16", 112, BF16, 8), 1),
    (Shape(80, None, "log8", 64, BF16, 5), 1),
    (Shape(80, None, "fp16", 48, HALF, 16), 2),
    (Shape(96, None, "fp16", 128, HALF, 6), 6),
    (Shape(96, None, "log8-symmetric", 16, BF16, 1), 7),
    (Shape(192, None, "log8", 112, BF16, 12), 1),
    (Shape(192, None, "fp16", 256, HALF, 7), 3),
    (Shape(128, None, "fp16", 64, BF16, 4, refined=False), 1),
    (Shape(64, None, "log8", 64, BF16, 3, refined=False), 1),
    (Shape(64, None, "log8-symmetric", 64, BF16, 3, split=True), 1),
    (Shape(128, None, "log8-symmetric", 112, HALF, 6, split=True), 2),
    (Shape(256, None, "log8-symmetric", 128, BF16, 4, split=True), 1),
    # Keys, values or both with 3 bits.
    (Shape(128, None, "log8-symmetric", 64, BF16, 6, bits=(3, 3)), 1),
    (Shape(128, None, "log8-symmetric", 64, BF16, 6, bits=(3, 2)), 1),
    (Shape(128, None, "log8-symmetric", 64, BF16, 6, bits=(2, 3)), 1),
    (Shape(128, None, "fp16", 112, HALF, 16, bits=(3, 3), refined=False), 2),
    (Shape(128, None, "log8", 16, HALF, 7, bits=(2, 3)), 8),
    (Shape(64, None, "log8-symmetric", 64, BF16, 3, bits=(3, 3)), 1),
    (Shape(64, None, "log8", 256, HALF, 5, bits=(3, 2)), 4),
    (Shape(64, None, "fp16", 16, BF16, 12, bits=(2, 3), refined=False), 1),
    (Shape(96, None, "log8-symmetric", 48, HALF, 1, bits=(3, 3)), 1),
    (Shape(96, None, "fp16", 64, BF16, 8, bits=(3, 2)), 3),
    (Shape(96, None, "log8", 128, BF16, 2, bits=(2, 3)), 7),
    (Shape(192, None, "log8", 64, BF16, 4, bits=(3, 3)), 1),
    (Shape(256, None, "log8-symmetric", 64, BF16, 4, bits=(3, 3)), 1),
    (Shape(256, None, "fp16", 16, HALF, 3, bits=(3, 2)), 5),
    (Shape(256, None, "log8", 112, BF16, 1, bits=(2, 3)), 1),
]


def border_lengths(page_size: int) -> list[int]:
    """One token, shorter than the sink and than the windows, page borders, half-full pages."""
    page = page_size
    pages = [k * page + off for k in (1, 5) for off in (-1, 0, 1, page // 2)]
    return [1, 2, 17, 63, 64, 65, 256, 257, 319, 320, 321, 322, 700, 1500, *pages]


@pytest.mark.parametrize(("sink", "recent"), [(64, 256), (4, 8)])
@pytest.mark.parametrize(
    ("shape", "new"), [pytest.param(*case, id=f"{named(case[0])}-{case[1]}") for case in GRID]
)
def test_geometries(
    shape: Shape, new: int, sink: int, recent: int, backend: CudaBackend, device: torch.device
) -> None:
    lengths = border_lengths(shape.page_size)
    counts = [1 + i % new for i in range(len(lengths))]
    counts[3] = 0  # padding
    step = make_step(shape, lengths, counts, device=device, sink=sink, recent=recent)
    assert decode.unsupported(step.q, step.q, step.layer) is None
    step.check(backend, max_query_len=new)


@pytest.mark.parametrize("gqa", [1, 2, 3, 5, 6, 7, 12, 16])
def test_gqa_ratios(gqa: int, backend: CudaBackend, device: torch.device) -> None:
    for kv_heads, new in ((1, 1), (3, 2)):
        shape = PLAIN._replace(gqa=gqa, kv_heads=kv_heads)
        make_step(shape, [400, 1000, 7], new, device=device).check(backend)


@pytest.mark.parametrize("new", range(1, 9))
def test_new_tokens(new: int, backend: CudaBackend, device: torch.device) -> None:
    counts = [new, 1, new, 0, max(1, new - 1), new]
    lengths = [new, 1, 321, 50, 900, 64 * 9 + new // 2]
    make_step(PLAIN, lengths, counts, device=device).check(backend)
    make_step(PLAIN, lengths, counts, device=device, sink=0, recent=1).check(backend)


# -- decode: batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "recent"), [(0, 1), (0, 40), (64, 4), (20, 17), (4, 16), (16, 1), (1, 300)]
)
def test_window_sizes(sink: int, recent: int, backend: CudaBackend, device: torch.device) -> None:
    lengths = [1, 2, 15, 16, 17, 33, 40, 63, 64, 65, 80, 300, 301, 500]
    step = make_step(PLAIN, lengths, 2, device=device, sink=sink, recent=recent)
    step.check(backend)


def test_one_sequence_alone(backend: CudaBackend, device: torch.device) -> None:
    for length in (1, 64, 320, 321, 385, 5000):
        make_step(PLAIN, [length], device=device, seed=length).check(backend)


def test_256_sequences(backend: CudaBackend, device: torch.device) -> None:
    lengths = torch.randint(0, 1500, (256,), generator=generator(1)).tolist()
    lengths[7], lengths[100], lengths[255] = 0, 9000, 0
    make_step(PLAIN, lengths, device=device).check(backend)


def test_a_few_long_among_many_short(backend: CudaBackend, device: torch.device) -> None:
    make_step(PLAIN, [30_000, *[330] * 40, 12_345], 2, device=device).check(backend)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_thousands_of_pages(page_size: int, backend: CudaBackend, device: torch.device) -> None:
    shape = PLAIN._replace(page_size=page_size)
    make_step(shape, [200_003], device=device).check(backend)


@pytest.mark.gpu
def test_a_million_tokens(backend: CudaBackend, device: torch.device) -> None:
    make_step(PLAIN._replace(kv_heads=1), [1_048_576, 5], device=device).check(backend)


def test_padding_reads_and_writes_nothing(backend: CudaBackend, device: torch.device) -> None:
    """Sequences without new tokens, with lengths or without, among and behind the others."""
    step = make_step(PLAIN, [0, 400, 700, 0, 500, 0], [0, 1, 0, 0, 2, 0], device=device)
    step.check(backend)
    step.check(backend, max_query_len=8)  # a plan may be generous
    none = make_step(PLAIN, [0, 400, 0], 0, device=device)
    assert bool(none.decode(backend, max_query_len=1).isnan().all())


def test_a_soft_cap(backend: CudaBackend, device: torch.device) -> None:
    for cap in (2.0, 50.0):
        make_step(PLAIN, [1, 300, 900], device=device, soft_cap=cap).check(backend)


@pytest.mark.parametrize("window", [1, 5, 64, 256, 257, 300, 1000, 5000])
def test_a_sliding_window(window: int, backend: CudaBackend, device: torch.device) -> None:
    lengths = [1, 40, 257, 320, 900, 1100, 3000]
    step = make_step(PLAIN, lengths, 3, device=device, sliding_window=window)
    step.check(backend)
    step = make_step(PLAIN, lengths, device=device, sliding_window=window, sink=4, recent=8)
    step.check(backend)


def test_folded_values(backend: CudaBackend, device: torch.device) -> None:
    make_step(PLAIN, [1, 320, 321, 1500], device=device, folded=True).check(backend)


@pytest.mark.parametrize(
    ("shape", "new"),
    [
        (PLAIN, 1),
        (Shape(64, None, "log8", 64, BF16, 3), 2),
        (Shape(128, 32, "log8", 112, HALF, 8), 1),
        (Shape(128, None, "fp16", 64, BF16, 7), 8),
        (Shape(256, None, "fp16", 64, BF16, 2), 3),
        (Shape(128, None, "log8-symmetric", 64, BF16, 6, bits=(3, 3)), 1),
        (Shape(64, None, "log8-symmetric", 64, BF16, 3, bits=(2, 3)), 1),
    ],
)
def test_values_times_a_hadamard_matrix(
    shape: Shape, new: int, backend: CudaBackend, device: torch.device
) -> None:
    """It is undone without being read."""
    lengths = [1, 320, 321, 1500, 70000]
    step = make_step(shape, lengths, new, device=device, hadamard_values=True)
    assert decode.Geometry.of(step.q, step.layer, new).value_hadamard
    step.check(backend)


# -- decode: numbers -----------------------------------------------------------------------------

SIZES = [
    {"value_size": 1e-3},
    {"value_size": 3e3},
    {"key_size": 1e-2},
    {"key_size": 300.0},
    {"octaves": 4.0},
    {"value_size": 100.0, "octaves": 5.0},
    {"query_outliers": 30.0},
]


@pytest.mark.parametrize(
    "numbers", SIZES, ids=lambda n: "-".join(f"{k}{v:g}" for k, v in n.items())
)
@pytest.mark.parametrize("bits", [(2, 2), (3, 3)], ids=["2-bits", "3-bits"])
@pytest.mark.parametrize("parameters", ["fp16", "log8"])
def test_large_and_small_numbers(
    parameters: str,
    bits: tuple[int, int],
    numbers: dict[str, float],
    backend: CudaBackend,
    device: torch.device,
) -> None:
    shape = PLAIN._replace(parameters=parameters, bits=bits)
    make_step(shape, [330, 1000, 4000], device=device, **numbers).check(backend)


def test_a_key_that_takes_it_all(backend: CudaBackend, device: torch.device) -> None:
    """Softmax close to one-hot: references move by a lot, other weights vanish."""
    step = make_step(PLAIN, [900, 2500], device=device)
    for layer in (step.clean, step.layer):
        layer.scale *= 8
    step.check(backend)


# -- decode: the call ----------------------------------------------------------------------------


def test_two_runs_give_the_same_bits(backend: CudaBackend, device: torch.device) -> None:
    lengths = [1, 321, 20_000, 3000, *range(300, 1300, 100)]
    for shape, new in (GRID[0], GRID[6]):
        step = make_step(shape, lengths, new, device=device)
        first = step.decode(backend)
        for again in (backend, backend, CudaBackend()):
            assert torch.equal(step.decode(again)[: step.tokens], first[: step.tokens])


def test_one_plan_for_layers_of_several_kinds(backend: CudaBackend, device: torch.device) -> None:
    """Windows, sliding windows and the soft cap are a layer's own."""
    step = make_step(PLAIN, [700, 90, 2000], device=device)
    backend.plan(*step.tables, max_query_len=1)
    plain = step.clean
    layers = [
        plain,
        replace(plain, sink=4, recent=30, memo={}),
        replace(plain, sliding_window=400, memo={}),
        replace(plain, scale=plain.scale / 2, memo={}),
        plain,
    ]
    outs = [step.blank_out().tensor for _ in layers]
    for layer, out in zip(layers, outs, strict=True):
        backend.decode(step.q, layer, out)
    for layer, out in zip(layers, outs, strict=True):
        step.clean = layer
        assert step.worst(out, step.expected()) <= BOUNDS[BF16]
    assert torch.equal(outs[0][: step.tokens], outs[-1][: step.tokens])


def test_strided_queries_outputs_tables_and_pools(
    backend: CudaBackend, device: torch.device
) -> None:
    """q out of a fused projection, out in a wider tensor, pages of several layers in one pool."""
    step = make_step(PLAIN, [700, 90, 2000], 2, device=device)
    expected, layer, heads = step.expected(), step.layer, step.q.shape[1]
    fused = torch.full((step.q.shape[0], heads + 4, 128), math.nan, dtype=BF16, device=device)
    fused[:, :heads] = step.q
    wide = Guarded(torch.full((step.q.shape[0], heads + 3, 128), math.nan, device=device).to(BF16))
    pools = [
        torch.full((x.shape[0], 3, *x.shape[1:]), 0xFF, dtype=torch.uint8, device=device)
        for x in (layer.history, layer.window.view(torch.uint8))
    ]
    pools[0][:, 1], pools[1][:, 1] = layer.history, layer.window.view(torch.uint8)
    pooled = replace(layer, history=pools[0][:, 1], window=pools[1].view(BF16)[:, 1])
    tables = [
        torch.cat([x, torch.zeros_like(x)], 1)[:, : x.shape[1]]
        for x in (step.history_table, step.window_table)
    ]
    backend.plan(step.seq_lens, step.query_start_loc, *tables, max_query_len=2)
    backend.decode(fused[:, :heads], pooled, wide.tensor[:, 1 : heads + 1])
    out = wide.tensor[:, 1 : heads + 1]
    assert step.worst(out, expected) <= BOUNDS[BF16]
    assert wide.intact()
    out[: step.tokens] = math.nan
    assert bool(wide.tensor.isnan().all())


@pytest.mark.gpu
def test_a_replayed_graph_reads_what_the_tensors_hold_then(
    backend: CudaBackend, device: torch.device
) -> None:
    first = make_step(PLAIN, [3000, 700, 65, 330], device=device, columns=256)
    out = first.blank_out()
    backend.plan(*first.tables, max_query_len=1)
    backend.decode(first.q, first.layer, out.tensor)  # reserves what it works in
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        backend.decode(first.q, first.layer, out.tensor)
    for lengths in ([3000, 700, 65, 330], [2999, 0, 65, 331], [1, 2, 320, 1023], [500, 4, 0, 0]):
        step = make_step(PLAIN, lengths, device=device, columns=256)  # with the same matrices
        for mine, captured in zip(step.tables, first.tables, strict=True):
            captured.copy_(mine)
        first.q[: step.q.shape[0]] = step.q
        first.layer.history[: step.layer.history.shape[0]] = step.layer.history
        first.layer.window[: step.layer.window.shape[0]] = step.layer.window
        out.tensor.fill_(math.nan)
        graph.replay()
        assert step.worst(out.tensor, step.expected()) <= BOUNDS[BF16]
        assert bool(out.tensor[step.tokens :].isnan().all())
        assert out.intact()


@pytest.mark.gpu
def test_other_widths_go_to_the_portable_backend(
    backend: CudaBackend, device: torch.device
) -> None:
    step = make_step(PLAIN._replace(bits=(3, 4)), [400, 90], device=device)
    step.layer = step.clean  # the portable one reads all that a sequence owns
    assert decode.unsupported(step.q, step.q, step.layer) == "3 and 4 bits"
    step.check(backend)
