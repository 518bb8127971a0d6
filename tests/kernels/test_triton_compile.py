"""Prefill compiles for GPUs that are not here, within the shared memory that each of them has.

In a process of its own: in this one, kernels are for the interpreter where there is no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

#: Shared memory of a program, in KiB.
LIMITS = {80: 163, 86: 99, 90: 227}
#: Compute capability, head_dim, new tokens. Each takes seconds: 128 columns fit everywhere alike.
CASES = [(80, 256, 512), (86, 256, 512), (86, 128, 512), (90, 128, 512)]


class _Driver:
    """Triton's driver of a GPU that is not here: enough to compile for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled(Exception):
    """Where compilation stops: memory is allocated, and the rest takes longest."""


def shared_bytes(capability: int, head_dim: int, tokens: int) -> int:
    """What `prefill` asks for in its launch on that GPU; bf16, usual recipe."""
    from helpers import make_layer
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    from oscarkv.kernels.plan import Plan
    from oscarkv.kernels.triton import prefill as module
    from oscarkv.recipe import Recipe

    kernel = module.prefill_kernel

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: kernel.run(
                *args, grid=grid, warmup=True, **{**options, "ASM": True}
            )

    def stop(self, source, metadata, *rest):
        raise _Compiled(metadata["shared"])

    layer = make_layer(Recipe(), head_dim, 2, page_size=64)
    layer.window = layer.window.bfloat16()
    q, k = (torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16) for heads in (8, 2))
    numbers = torch.zeros(1, 16, dtype=torch.int32)
    plan = Plan(numbers[0, :1], numbers[0, :2], numbers, numbers, False, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_ptx", stop)
        patch.setattr(module, "prefill_kernel", Launch())
        patch.setattr(module, "shared_memory", lambda device: LIMITS[capability] * 1024)
        driver.set_active(_Driver(capability))
        with pytest.raises(_Compiled) as compiled:
            module.prefill(plan, q, k, k, layer, torch.empty_like(q))
    return compiled.value.args[0]


def test_prefill_fits_into_shared_memory(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DISABLE_LINE_INFO": "1",  # faster
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, str(Path(__file__))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    needed = {tuple(case): count for case, count in json.loads(result.stdout)}
    assert set(needed) == set(CASES)
    too_large = {case: n for case, n in needed.items() if n > LIMITS[case[0]] * 1024}
    assert not too_large


if __name__ == "__main__":
    print(json.dumps([(case, shared_bytes(*case)) for case in CASES]))
