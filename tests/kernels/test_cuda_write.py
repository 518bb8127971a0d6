"""The CUDA write kernel against the oracle, byte by byte (compiled: make test-gpu; else emulated).

What a kernel must not read is NaN, and what it must not write is checked: see `steps.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import generator
from kernels.cuda_helpers import BF16, HALF, PLAIN, blank_layer, named, rng_of, some_slots
from kernels.steps import Guarded, Shape, normal
from kernels.triton_helpers import assert_codes_at_thresholds, hard_rows, moved, without_transforms
from torch import Tensor

pytest.importorskip("cuda.core")
pytest.importorskip("triton")
from oscarkv.kernels import LayerCache
from oscarkv.kernels.cuda import write
from oscarkv.kernels.cuda.backend import CudaBackend
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.linalg import hadamard

pytestmark = pytest.mark.compiled


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
    (Shape(64, None, "log8-symmetric", 64, BF16, split=True), {}, False, 40),
    (Shape(128, None, "log8-symmetric", 112, HALF, split=True), {"key_gain": 1.0}, False, 1100),
    (Shape(256, None, "log8-symmetric", 64, BF16, split=True), {}, True, 40),
    # Keys, values or both with 3 bits.
    (Shape(128, None, "log8-symmetric", 64, BF16, bits=(3, 3)), {}, False, 40),
    (Shape(128, None, "log8-symmetric", 64, BF16, bits=(3, 2)), {}, False, 1100),
    (Shape(128, None, "log8-symmetric", 112, HALF, bits=(2, 3)), {}, False, 40),
    (Shape(64, None, "log8-symmetric", 64, BF16, bits=(3, 3)), {}, False, 1100),
    (Shape(64, None, "log8", 16, HALF, bits=(3, 2)), {"key_gain": 1.0}, False, 40),
    (Shape(64, None, "fp16", 64, BF16, bits=(2, 3), refined=False), {}, True, 40),
    (Shape(96, None, "log8-symmetric", 48, HALF, bits=(3, 3)), {}, False, 1100),
    (Shape(96, None, "fp16", 64, BF16, bits=(3, 2), refined=False), {}, False, 40),
    (Shape(192, None, "log8", 64, BF16, bits=(3, 3)), {}, False, 40),
    (Shape(256, None, "log8-symmetric", 64, BF16, bits=(3, 3)), {}, False, 40),
    (
        Shape(256, None, "log8", 16, HALF, bits=(3, 3), refined=False),
        {"value_gain": 0.5},
        False,
        40,
    ),
    (Shape(256, None, "fp16", 64, BF16, bits=(3, 2)), {}, False, 1100),
]


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
    "case",
    [0, 1, 6, 8, 9, 11, 12, 16, 19, 21, *range(len(WRITES) - 15, len(WRITES))],
    ids=lambda i: named(WRITES[i][0]),
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


@pytest.mark.parametrize("count", [40, 1100])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_values_times_a_hadamard_matrix(
    dim: int, count: int, backend: CudaBackend, device: torch.device
) -> None:
    """A transform of signs has a kernel of its own; codes differ at thresholds only."""
    shape, pages = Shape(dim, None, "fp16", 64, BF16), 4 + count // 16
    layer = on_cpu(blank_layer(shape, pages, device))
    signs = hadamard(dim).float().expand_as(layer.transforms.value).contiguous()
    layer = replace(layer, transforms=replace(layer.transforms, value=signs), memo={})
    k, v = torch.randn(2, count, 2, dim, generator=generator(dim)).to(BF16)
    slots = some_slots(count, pages, shape.page_size, torch.device("cpu"))
    ours = moved(layer, device)
    nowhere = torch.full_like(slots, -1)
    assert write.Geometry.of(k.to(device), ours).value_signs
    backend.write(*(x.to(device) for x in (k, v, slots, nowhere)), ours)
    TorchBackend().write(k.float(), v.float(), slots, nowhere, layer)
    assert_codes_at_thresholds(on_cpu(ours), layer, k.float(), v.float(), slots)


@pytest.mark.parametrize("case", [0, 6, 15, len(WRITES) - 12], ids=lambda i: named(WRITES[i][0]))
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


@pytest.mark.gpu
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
