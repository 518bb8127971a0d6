"""`write`, `decode` and `prefill` on NVIDIA GPUs, graph-safe: nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscarkv.kernels.cuda.decode import DecodeKernel, Geometry
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.triton.backend import TritonBackend
from oscarkv.kernels.triton.plan import Plan

HALF_TYPES = (torch.bfloat16, torch.float16)


class CudaBackend:
    """CUDA C++ where the layer allows it; the Triton backend for everything else."""

    name = "cuda"
    write_batch = 1

    def __init__(self) -> None:
        self._portable = TritonBackend()
        self._plan: Plan | None = None
        self._kernels: dict[Any, DecodeKernel] = {}
        self._shared_out: set[Any] = set()  # kernels whose work this step has shared out

    def plan(
        self,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        strict: bool = False,
        max_query_len: int | None = None,
    ) -> None:
        if max_query_len is None:
            lengths = query_start_loc[1:] - query_start_loc[:-1]
            max_query_len = int(lengths.max()) if lengths.numel() else 0
        self._plan = Plan(
            seq_lens, query_start_loc, history_table, window_table, strict, max_query_len
        )
        self._portable.plan(
            seq_lens, query_start_loc, history_table, window_table, strict, max_query_len
        )
        self._shared_out.clear()

    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        self._portable.write(k, v, history_slots, window_slots, layer)

    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        assert self._plan is not None
        plan = self._plan
        if unsupported(q, layer) is not None:
            return self._portable.decode(q, layer, out)
        if not q.shape[0]:
            return None
        group = q.shape[1] // layer.kv_heads
        geometry = Geometry.of(q, layer, plan.max_query_len)
        key = (geometry, layer.kv_heads, group, layer.sink, layer.recent, layer.sliding_window, plan.max_query_len)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = DecodeKernel(geometry, q.device)
        arguments = kernel.arguments(plan, layer, q.shape[1])
        moment = (key, _capture())
        if moment not in self._shared_out:
            kernel.plan(arguments)
            self._shared_out.add(moment)
        kernel.run(arguments, q, out)
        return None

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        self._portable.prefill(q, k, v, layer, out)


def _capture() -> int:
    """Number of the graph capture under way, 0 if none: each must share out its own work."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    return int(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)[2])


def unsupported(x: Tensor, layer: LayerCache) -> str | None:
    """Why the CUDA kernels do not take this layer, or None."""
    layout = layer.layout
    if (layout.key_bits, layout.value_bits) != (2, 2):
        return f"{layout.key_bits} and {layout.value_bits} bits"
    if layout.head_dim > 256:
        return f"head_dim {layout.head_dim}"
    words = layout.head_dim // 16
    if layout.groups > 1 and (words not in (4, 8, 16) or layout.groups > words // 2 or layout.groups > 8):
        return f"{layout.groups} groups of head_dim {layout.head_dim}"
    if x.dtype not in HALF_TYPES or layer.window.dtype != x.dtype:
        return f"{x.dtype} with windows in {layer.window.dtype}"
    return None
