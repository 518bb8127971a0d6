"""The CUDA backend as a whole against the oracle in fp64 (needs a GPU: make test-gpu).

What a kernel must not read is NaN, and what it must not write is checked: see `steps.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from helpers import relative_error
from kernels.cuda_helpers import BF16, HALF, PLAIN, blank_layer, rng_of
from kernels.steps import BOUNDS, Guarded, Shape, make_step, normal
from torch import Tensor

pytest.importorskip("cuda.core")
pytest.importorskip("triton")
from oscarkv.kernels import LayerCache, get_backend
from oscarkv.kernels.cuda.backend import CudaBackend
from oscarkv.kernels.torch_backend import TorchBackend

pytestmark = pytest.mark.gpu


def test_it_is_the_one_chosen() -> None:
    assert get_backend().name == "cuda"
    assert isinstance(get_backend("cuda"), CudaBackend)


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
