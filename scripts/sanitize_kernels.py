"""A few small calls of every CUDA kernel, to be watched by compute-sanitizer (needs a GPU):

    compute-sanitizer --tool memcheck --report-api-errors no python scripts/sanitize_kernels.py
    compute-sanitizer --tool racecheck python scripts/sanitize_kernels.py

API errors are left out: the driver bindings probe for functions that the driver may not have.
Tensors are allocated one by one, so that memcheck sees where each of them ends. Results are checked
too; the tests (make test-gpu) do so at length.
"""

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from kernels.steps import Shape, SyntheticStep, make_step, normal

from oscarkv.kernels.cuda.backend import CudaBackend
from oscarkv.kernels.torch_backend import TorchBackend

BF16, HALF = torch.bfloat16, torch.float16
#: Shapes, new tokens, and what else is special.
STEPS = [
    (Shape(128, None, "fp16", 64, BF16, 4), 1, {}),
    (Shape(128, None, "fp16", 64, BF16, 8), 2, {"sliding_window": 100, "folded": True}),
    (Shape(128, 32, "log8", 48, HALF, 3), 1, {"soft_cap": 30.0}),
    (Shape(64, None, "log8", 112, BF16, 6), 3, {}),
    (Shape(80, None, "log8-symmetric", 16, HALF, 5), 1, {}),
    (Shape(256, 64, "fp16", 64, BF16, 2), 8, {}),
    (Shape(128, None, "log8-symmetric", 64, BF16, 4, split=True), 1, {}),
    (Shape(64, None, "log8-symmetric", 48, HALF, 3, split=True), 1, {}),
    (Shape(128, None, "log8-symmetric", 16, BF16, 8, split=True), 2, {"soft_cap": 30.0}),
]
LENGTHS = [1, 0, 17, 64, 130, 333, 700]
CHUNK = 40


def write(backend: CudaBackend, step: SyntheticStep) -> None:
    """A chunk, then one token for each sequence, into pages that nobody reads afterwards."""
    shape, device = step.shape, step.q.device
    rng = torch.Generator(device).manual_seed(0)
    pages, windows = step.clean.history.shape[0], step.clean.window.shape[0]
    for count in (CHUNK, len(LENGTHS), 1):
        k, v = (normal((count, 2, shape.head_dim), rng).to(shape.dtype) for _ in range(2))
        slots = torch.randperm(pages * shape.page_size, device=device, generator=rng)[:count]
        window_slots = torch.randperm(windows * 16, device=device, generator=rng)[:count]
        slots[0] = window_slots[-1] = -1
        backend.write(k, v, slots, window_slots, step.clean)


def prefill(backend: CudaBackend, shape: Shape, device: torch.device) -> None:
    counts = [CHUNK, 1, 0, 20]
    step = make_step(shape, [300, 100, 5, 20], counts, device=device, guard=0)
    q = step.q[: step.tokens]
    k, v = torch.randn(2, step.tokens, 2, shape.head_dim, device=device).to(shape.dtype)
    out, expected = torch.zeros_like(q), torch.zeros_like(q, dtype=torch.float64)
    for each, result in ((backend, out), (TorchBackend(torch.float64), expected)):
        each.plan(*step.tables, max_query_len=CHUNK)
        each.prefill(q, k, v, step.clean, result)
    assert step.worst(out, expected) <= 2e-3


def main() -> None:
    device, backend = torch.device("cuda"), CudaBackend()
    for shape, new, special in STEPS:
        step = make_step(shape, LENGTHS, new, device=device, guard=0, **special)
        step.check(backend)
        write(backend, step)
        print(*shape, "decode and write: ok", flush=True)
    prefill(backend, STEPS[0][0], device)
    torch.cuda.synchronize()
    print("prefill: ok")


if __name__ == "__main__":
    main()
