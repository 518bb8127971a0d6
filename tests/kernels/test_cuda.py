"""The CUDA backend against the oracle in fp64, on the same bytes (needs a GPU: make test-gpu).

What a kernel must not read is NaN, and what it must not write is checked: see `steps.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import generator, relative_error
from kernels.steps import BOUNDS, Guarded, Shape, make_layer, make_step, normal
from kernels.triton_helpers import assert_codes_at_thresholds, hard_rows, moved, without_transforms
from torch import Tensor

pytest.importorskip("cuda.core")
pytest.importorskip("triton")
from oscarkv.kernels import LayerCache, get_backend
from oscarkv.kernels.cuda import decode, write
from oscarkv.kernels.cuda.backend import CudaBackend
from oscarkv.kernels.torch_backend import TorchBackend

pytestmark = pytest.mark.gpu

HALF, BF16 = torch.float16, torch.bfloat16
#: The one that most tests use: it is compiled once.
PLAIN = Shape()


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    """One for all: its working memory is used again by every kind of batch."""
    return CudaBackend()


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
]


def named(shape: Shape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    refined = "-refined" if shape.recipe().refined else ""
    return (
        f"{shape.head_dim}-{shape.group_size}-{shape.parameters}-{shape.page_size}-{dtype}{refined}"
    )


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


@pytest.mark.parametrize("page_size", [16, 64])
def test_thousands_of_pages(page_size: int, backend: CudaBackend, device: torch.device) -> None:
    shape = PLAIN._replace(page_size=page_size)
    make_step(shape, [200_003], device=device).check(backend)


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
@pytest.mark.parametrize("parameters", ["fp16", "log8"])
def test_large_and_small_numbers(
    parameters: str, numbers: dict[str, float], backend: CudaBackend, device: torch.device
) -> None:
    shape = PLAIN._replace(parameters=parameters)
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


def test_other_widths_go_to_the_portable_backend(
    backend: CudaBackend, device: torch.device
) -> None:
    step = make_step(PLAIN._replace(bits=(3, 4)), [400, 90], device=device)
    step.layer = step.clean  # the portable one reads all that a sequence owns
    assert decode.unsupported(step.q, step.q, step.layer) == "3 and 4 bits"
    step.check(backend)


def test_it_is_the_one_chosen() -> None:
    assert get_backend().name == "cuda"
    assert isinstance(get_backend("cuda"), CudaBackend)


# -- write ---------------------------------------------------------------------------------------

#: Shapes, further knobs, whether values are folded, and tokens (many have a variant of their own).
WRITES = [
    (Shape(128, None, "fp16", 64, BF16), {}, False, 40),
    (Shape(128, None, "fp16", 64, BF16), {}, False, 1100),
    (Shape(128, None, "fp16", 64, BF16), {}, True, 40),
    (Shape(128, 64, "log8", 48, HALF), {}, True, 40),
    (Shape(128, 32, "log8-symmetric", 16, BF16), {"key_gain": 0.5}, False, 40),
    (Shape(64, None, "log8", 112, HALF), {"value_gain": 0.0}, False, 40),
    (Shape(64, 32, "fp16", 256, BF16), {}, False, 1100),
    (Shape(256, None, "fp16", 128, HALF), {"key_gain": 0.25}, False, 40),
    (Shape(256, 64, "log8", 64, BF16), {}, False, 1100),
    (Shape(80, None, "log8", 48, BF16), {}, False, 40),
    (Shape(96, None, "log8-symmetric", 64, HALF), {}, True, 40),
    (Shape(192, None, "fp16", 16, BF16), {}, False, 40),
    *(
        (Shape(dim, None, stored, 64, BF16, refined=False), {}, False, count)
        for dim, stored, count in (
            (64, "log8", 40),
            (80, "log8-symmetric", 40),
            (96, "fp16", 40),
            (128, "fp16", 40),
            (128, "log8", 1100),
            (192, "log8", 40),
            (256, "fp16", 1100),
        )
    ),
    (Shape(64, None, "log8-symmetric", 64, HALF), {"key_gain": 1.0}, False, 1100),
    (Shape(80, None, "fp16", 16, BF16), {}, False, 1100),
    (Shape(96, None, "log8", 64, BF16), {}, False, 1100),
    (Shape(192, None, "log8-symmetric", 64, HALF), {"key_gain": 0.0}, False, 1100),
    (Shape(256, None, "log8", 64, BF16), {}, True, 1100),
]


def blank_layer(shape: Shape, pages: int, device: torch.device, **knobs: float) -> LayerCache:
    """Unwritten pages, all bytes 0xFF, between guards."""
    recipe = replace(shape.recipe(), **knobs)
    layer = make_layer(shape, torch.Generator(device).manual_seed(1), recipe=recipe, pages=pages)
    layer.history = Guarded(torch.full_like(layer.history, 0xFF)).tensor
    layer.window = Guarded(torch.full_like(layer.window, math.nan)).tensor
    return layer


def some_slots(count: int, pages: int, size: int, device: torch.device) -> Tensor:
    """Slots of pages 1 and up, in any order."""
    return (torch.randperm((pages - 1) * size, generator=generator(2))[:count] + size).to(device)


def on_cpu(layer: LayerCache) -> LayerCache:
    return moved(layer, torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "knobs", "folded", "count"),
    [pytest.param(*case, id=f"{named(case[0])}-{case[2]}-{case[3]}") for case in WRITES],
)
def test_equal_rows_give_equal_bytes(
    shape: Shape, knobs: dict, folded: bool, count: int, backend: CudaBackend, device: torch.device
) -> None:
    """With the identity for a transform, rows are exact, and so all bytes are the oracle's."""
    pages = 4 + count // 16
    layer = without_transforms(on_cpu(blank_layer(shape, pages, device, **knobs)))
    if not folded:
        transforms = layer.transforms
        eye, zero = transforms.key, transforms.key_mean
        layer.transforms = replace(transforms, value=eye, value_inverse=eye, value_mean=zero)
    k, v = (x.to(shape.dtype) for x in hard_rows(count, 2, shape.head_dim, 3))
    slots = some_slots(count, pages, shape.page_size, torch.device("cpu"))
    window_slots = some_slots(count, pages, 16, torch.device("cpu"))
    window_slots[::3] = -1
    ours = moved(layer, device)
    arguments = [x.to(device) for x in (k, v, slots, window_slots)]
    assert write.unsupported(arguments[0], arguments[1], ours) is None
    backend.write(*arguments, ours)
    TorchBackend().write(k.float(), v.float(), slots, window_slots, layer)
    names = ("K codes", "V codes", "K parameters", "V parameters")
    written, expected = (x.layout.sections(x.history.cpu()) for x in (ours, layer))
    for name, mine, theirs in zip(names, written, expected, strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(ours.history.cpu(), layer.history)  # the padding too
    assert torch.equal(bits(ours.window.cpu()), bits(layer.window))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize(
    "case", [0, 1, 6, 8, 9, 11, 12, 16, 19, 21], ids=lambda i: named(WRITES[i][0])
)
def test_codes_differ_from_the_oracle_only_at_thresholds(
    case: int, backend: CudaBackend, device: torch.device
) -> None:
    shape, _, _, count = WRITES[case]
    count *= 4 if count < 100 else 1
    pages = 4 + count // 16
    layer = on_cpu(blank_layer(shape, pages, device))
    k, v = torch.randn(2, count, 2, shape.head_dim, generator=generator(case)).to(shape.dtype)
    slots = some_slots(count, pages, shape.page_size, torch.device("cpu"))
    ours = moved(layer, device)
    nowhere = torch.full_like(slots, -1)
    backend.write(*(x.to(device) for x in (k, v, slots, nowhere)), ours)
    TorchBackend().write(k.float(), v.float(), slots, nowhere, layer)
    assert_codes_at_thresholds(on_cpu(ours), layer, k.float(), v.float(), slots)


@pytest.mark.parametrize("case", [0, 6, 15], ids=lambda i: named(WRITES[i][0]))
def test_a_chunk_and_single_tokens_write_the_same_bytes(
    case: int, backend: CudaBackend, device: torch.device
) -> None:
    shape, count, pages = WRITES[case][0], 2000, 130
    chunk, parts, again = (blank_layer(shape, pages, device) for _ in range(3))
    k, v = (normal((count, 2, shape.head_dim), rng_of(device, i)).to(shape.dtype) for i in (0, 1))
    slots, windows = (some_slots(count, pages, n, device) for n in (shape.page_size, 16))
    backend.write(k, v, slots, windows, chunk)
    start = 0
    for size in (1, 1, 2, 7, 16, 256, 317, 1000, 400):
        part = slice(start, start + size)
        backend.write(k[part], v[part], slots[part], windows[part], parts)
        start += size
    assert start == count
    backend.write(k, v, slots, windows, again)
    for other in (parts, again):
        assert torch.equal(chunk.history, other.history)
        assert torch.equal(bits(chunk.window), bits(other.window))


def rng_of(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def test_slot_minus_one_writes_nothing(backend: CudaBackend, device: torch.device) -> None:
    shape = PLAIN._replace(page_size=16)
    layer = blank_layer(shape, 3, device)
    k, v = (normal((4, 2, 128), rng_of(device, i)).to(BF16) for i in (0, 1))
    k[0] = v[2] = math.nan  # padding may hold anything
    history_slots = torch.tensor([-1, 20, -1, 33], device=device)
    window_slots = torch.tensor([-1, 17, 3, -1], device=device)  # 3: page 0 is no page
    backend.write(k, v, history_slots, window_slots, layer)
    touched = torch.zeros(3, 16, dtype=torch.bool, device=device)
    for section in layer.layout.sections(layer.history):
        touched |= (section != 0xFF).any(-1).any(1)
    assert touched.nonzero().tolist() == [[1, 4], [2, 1]]
    exact = (~layer.window.isnan()).any(-1).any(2).any(1)
    assert exact.nonzero().tolist() == [[1, 1]]
    before = layer.history.clone()
    nowhere = torch.full_like(history_slots, -1)
    backend.write(k, v, nowhere, nowhere, layer)
    backend.write(k[:0], v[:0], nowhere[:0], nowhere[:0], layer)
    assert torch.equal(layer.history, before)


def test_writing_stays_between_its_guards(backend: CudaBackend, device: torch.device) -> None:
    """First and last page, fused projections, pages of several layers in one pool."""
    layer = blank_layer(PLAIN, 4, device)
    history = Guarded(
        torch.full((4, 3, *layer.history.shape[1:]), 0xFF, dtype=torch.uint8, device=device)
    )
    window = Guarded(torch.full((4, 3, *layer.window.shape[1:]), math.nan, device=device).to(BF16))
    layer.history, layer.window = history.tensor[:, 1], window.tensor[:, 1]
    fused = Guarded(normal((4, 2 + 2 + 2, 128), rng_of(device, 0)).to(BF16))
    k, v = fused.tensor[:, 2:4], fused.tensor[:, 4:]
    slots = torch.tensor([0, 63, 255, 192], device=device)
    windows = torch.tensor([16, 31, 63, 48], device=device)
    backend.write(k, v, slots, windows, layer)
    plain = blank_layer(PLAIN, 4, device)
    backend.write(k.contiguous(), v.contiguous(), slots, windows, plain)
    assert torch.equal(history.tensor[:, 1], plain.history)
    torch.testing.assert_close(window.tensor[:, 1], plain.window, rtol=0, atol=0, equal_nan=True)
    for guarded in (history, window, fused):
        assert guarded.intact()
    assert bool((history.tensor[:, ::2] == 0xFF).all())
    assert bool(window.tensor[:, ::2].isnan().all())


def test_a_captured_write_reads_what_the_tensors_hold_then(
    backend: CudaBackend, device: torch.device
) -> None:
    layer, plain = (blank_layer(PLAIN, 4, device) for _ in range(2))
    k, v = (normal((6, 2, 128), rng_of(device, i)).to(BF16) for i in (0, 1))
    slots, windows = (torch.full((6,), -1, device=device) for _ in range(2))
    backend.write(k, v, slots, windows, layer)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        backend.write(k, v, slots, windows, layer)
    slots.copy_(torch.tensor([64, 65, -1, 200, 100, 130], device=device))
    windows.copy_(torch.tensor([16, -1, -1, 63, 40, 30], device=device))
    k.copy_(normal(k.shape, rng_of(device, 5)))
    graph.replay()
    backend.write(k, v, slots, windows, plain)
    assert torch.equal(layer.history, plain.history)
    assert torch.equal(bits(layer.window), bits(plain.window))
    assert bool((plain.history != 0xFF).any())


# -- prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strict"),
    [
        (Shape(128, None, "fp16", 64, BF16, 4), False),
        (Shape(64, None, "log8", 112, HALF, 3), False),
        (Shape(128, None, "fp16", 64, BF16, 4), True),
    ],
    ids=["128-bf16", "64-fp16", "128-bf16-strict"],
)
def test_prefill(shape: Shape, strict: bool, backend: CudaBackend, device: torch.device) -> None:
    """Chunks over history and without, one of a single token, one empty: against the oracle."""
    before, counts = [700, 0, 333, 40, 64], [150, 300, 1, 0, 65]
    lengths = [a + b for a, b in zip(before, counts, strict=True)]
    step = make_step(shape, lengths, counts, device=device)
    tokens, heads = step.tokens, shape.kv_heads
    k, v = (normal((tokens, heads, shape.head_dim), rng_of(device, i)) for i in (3, 4))
    k, v = (Guarded(x.to(shape.dtype)).tensor for x in (k, v))
    q, out = step.q[:tokens], step.blank_out()
    backend.plan(*step.tables, strict=strict, max_query_len=max(counts))
    backend.prefill(q, k, v, step.layer, out.tensor[:tokens])
    oracle = TorchBackend(torch.float64)
    oracle.plan(*step.tables, strict=strict)
    expected = torch.full(q.shape, math.nan, dtype=torch.float64, device=device)
    oracle.prefill(q, k, v, step.clean, expected)
    assert step.worst(out.tensor, expected) <= BOUNDS[BF16]  # weights have the inputs' bits
    assert out.intact()
    assert bool(out.tensor[tokens:].isnan().all())


# -- all together --------------------------------------------------------------------------------


def test_a_conversation(backend: CudaBackend, device: torch.device) -> None:
    """Prompt, then token by token: what was written is what is read, as the oracle reads it."""
    layer = blank_layer(PLAIN, 8, device)
    layer = replace(layer, sink=4, recent=8)
    table = torch.tensor([[3, 1, 5]], dtype=torch.int32, device=device)
    windows = torch.arange(1, 13, dtype=torch.int32, device=device).flip(0)[None]
    layer.window = torch.full((13, *layer.window.shape[1:]), math.nan, device=device).to(BF16)
    oracle, length = TorchBackend(torch.float64), 0
    for seed, count in enumerate((100, 1, 1, 5, 30, 1, 8)):
        q = (normal((count, 8, 128), rng_of(device, seed)) * 2).to(BF16)
        k, v = (normal((count, 2, 128), rng_of(device, 100 * i + seed)).to(BF16) for i in (1, 2))
        positions = torch.arange(length, length + count, device=device)
        length += count
        slots = table[0, positions // 64].long() * 64 + positions % 64
        window_slots = windows[0, positions // 16].long() * 16 + positions % 16
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        starts = torch.tensor([0, count], dtype=torch.int32, device=device)
        out = torch.full_like(q, math.nan)
        expected = torch.empty(q.shape, dtype=torch.float64, device=device)
        backend.plan(lengths, starts, table, windows, max_query_len=count)
        backend.write(k, v, slots, window_slots, layer)
        readable = replace(
            layer, history=layer.history.clone(), window=layer.window.clone(), memo={}
        )
        wipe(readable, table, windows, length)
        oracle.plan(lengths, starts, table, windows)
        if count <= 8:
            backend.decode(q, layer, out)
            oracle.decode(q, readable, expected)
        else:
            backend.prefill(q, k, v, layer, out)
            oracle.prefill(q, k, v, readable, expected)
        assert relative_error(out, expected) <= BOUNDS[BF16]


def wipe(layer: LayerCache, table: Tensor, windows: Tensor, length: int) -> None:
    """Zero what nobody has written: the oracle multiplies it by zero, and NaN stays NaN."""
    positions = torch.arange(table.shape[1] * 64, device=table.device)[length:]
    pages = table[0, positions // 64].long()
    for section in layer.layout.sections(layer.history):
        section[pages, :, positions % 64] = 0
    layer.history[0] = 0
    layer.window.nan_to_num_(0.0)
