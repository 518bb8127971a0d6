"""Prefill and write compile for GPUs that are not here, within the shared memory each of them has.

In a process of its own: in this one, kernels are for the interpreter where there is no GPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

#: Shared memory of a program, in KiB.
LIMITS = {80: 163, 86: 99, 90: 227}
#: Compute capability, head_dim, new tokens. Each takes seconds: 128 columns fit everywhere alike.
CASES = [(80, 256, 512), (86, 256, 512), (86, 128, 512), (90, 128, 512)]
#: Knobs of the recipes whose keys are written in different ways, by name.
WRITTEN = {
    "refined": {},
    "split": {"parameters": "log8-symmetric", "split_scales": True},
    "3 bits, refined": {"key_bits": 3},
    "3 bits, split": {"key_bits": 3, "parameters": "log8-symmetric", "split_scales": True},
}


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


def shared_bytes(
    module: Any, kernel: str, capability: int, launch: Callable[[], None], **forced: bool
) -> int:
    """What a launch of a module's kernel asks for on that GPU; `forced`: options of the kernel."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    own = getattr(module, kernel)

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: own.run(
                *args, grid=grid, warmup=True, **{**options, **forced}
            )

    def stop(self, source, metadata, *rest):
        raise _Compiled(metadata["shared"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_ptx", stop)
        patch.setattr(module, kernel, Launch())
        driver.set_active(_Driver(capability))
        with pytest.raises(_Compiled) as compiled:
            launch()
    return compiled.value.args[0]


def prefill_bytes(capability: int, head_dim: int, tokens: int) -> int:
    """Of prefill, bf16, usual recipe."""
    from helpers import make_layer

    from oscarkv.kernels.plan import Plan
    from oscarkv.kernels.triton import prefill as module
    from oscarkv.recipe import Recipe

    layer = make_layer(Recipe(), head_dim, 2, page_size=64)
    layer.window = layer.window.bfloat16()
    q, k = (torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16) for heads in (8, 2))
    numbers = torch.zeros(1, 16, dtype=torch.int32)
    plan = Plan(numbers[0, :1], numbers[0, :2], numbers, numbers, False, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shared_memory", lambda device: LIMITS[capability] * 1024)
        return shared_bytes(
            module,
            "prefill_kernel",
            capability,
            lambda: module.prefill(plan, q, k, k, layer, torch.empty_like(q)),
            ASM=True,
        )


def write_bytes(knobs: dict[str, Any]) -> int:
    """Of write, bf16, on the GPU with the least shared memory."""
    from helpers import make_layer

    from oscarkv.kernels.triton import write as module
    from oscarkv.recipe import Recipe

    layer = make_layer(Recipe(**knobs), 96, 2, page_size=64)
    layer.window = layer.window.bfloat16()
    k, slots = torch.empty(20, 2, 96, dtype=torch.bfloat16), torch.zeros(20, dtype=torch.int64)
    return shared_bytes(module, "_write", 86, lambda: module.write(k, k, slots, slots, layer))


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Bytes by case, of prefill and of write."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DISABLE_LINE_INFO": "1",  # faster
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, str(Path(__file__))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_prefill_fits_into_shared_memory(needed: dict[str, Any]) -> None:
    found = {tuple(case): count for case, count in needed["prefill"]}
    assert set(found) == set(CASES)
    too_large = {case: n for case, n in found.items() if n > LIMITS[case[0]] * 1024}
    assert not too_large


def test_every_way_of_writing_keys_compiles(needed: dict[str, Any]) -> None:
    assert set(needed["write"]) == set(WRITTEN)
    assert max(needed["write"].values()) <= LIMITS[86] * 1024


if __name__ == "__main__":
    found = {
        "prefill": [(case, prefill_bytes(*case)) for case in CASES],
        "write": {name: write_bytes(knobs) for name, knobs in WRITTEN.items()},
    }
    print(json.dumps(found))
