"""`write`, `decode` and `prefill` on NVIDIA GPUs, graph-safe: nothing waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from oscarkv.errors import CacheError
from oscarkv.kernels.cuda import decode, write
from oscarkv.kernels.cuda.compile import CompileError
from oscarkv.kernels.cuda.launch import refuse_capture
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.triton.backend import TritonBackend

_Kernel = TypeVar("_Kernel")


class CudaBackend:
    """CUDA C++ where a layer allows it; the Triton backend for everything else, and for prefill.

    Constants and working memory are made at a kernel's first run: capture a graph after a plain
    run of the same batch. A larger batch than any before takes new memory, and graphs keep the old
    addresses: `reserve` before the first run.
    """

    name = "cuda"
    write_batch = 1

    def __init__(self) -> None:
        self._portable = TritonBackend()
        self._plan: Plan | None = None
        self._kernels: dict[Hashable, object] = {}
        self._shared_out: set[Hashable] = set()  # kernels whose work this step has shared out
        self._failed = False
        self._sequences = 0

    def reserve(self, sequences: int) -> None:
        self._sequences = max(sequences, self._sequences)

    def plan(
        self,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        strict: bool = False,
        max_query_len: int | None = None,
    ) -> None:
        self._portable.plan(
            seq_lens, query_start_loc, history_table, window_table, strict, max_query_len
        )
        self._plan = self._portable.planned()
        self._shared_out.clear()

    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        if not k.shape[0]:
            return None
        if _elsewhere(k):
            with torch.cuda.device(k.device):
                return self.write(k, v, history_slots, window_slots, layer)
        if not self._failed and write.unsupported(k, v, layer) is None:
            geometry = write.Geometry.of(k, layer)
            key = (geometry, k.device)
            kernel = self._kernel(key, lambda: write.WriteKernel(geometry, k.device))
            if kernel is not None:
                return kernel.run(k, v, history_slots, window_slots, layer)
        return self._portable.write(k, v, history_slots, window_slots, layer)

    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        plan = self._plan
        if plan is None:
            raise CacheError("call plan() before write(), decode() or prefill()")
        if not q.shape[0]:
            return None
        if _elsewhere(q):
            with torch.cuda.device(q.device):
                return self.decode(q, layer, out)
        if not self._failed and decode.unsupported(q, out, layer) is None:
            geometry = decode.Geometry.of(q, layer, plan.max_query_len)
            work = (layer.kv_heads, q.shape[1], layer.sink, layer.recent, layer.sliding_window)
            key = (
                geometry,
                work,
                plan.max_query_len,
                q.device,
            )  # one way to share work out
            kernel = self._kernel(key, lambda: decode.DecodeKernel(geometry, q.device))
            if kernel is not None:
                arguments = kernel.arguments(plan, layer, q.shape[1], self._sequences)
                moment = (key, _capture())
                if moment not in self._shared_out:
                    kernel.plan(arguments)
                    self._shared_out.add(moment)
                return kernel.run(arguments, q, out)
        return self._portable.decode(q, layer, out)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        self._portable.prefill(q, k, v, layer, out)

    def _kernel(self, key: Hashable, make: Callable[[], _Kernel]) -> _Kernel | None:
        """A kernel, compiled at first use; None, after a warning, if that fails."""
        found = self._kernels.get(key)
        if found is None:
            refuse_capture()
            try:
                found = self._kernels[key] = make()
            except CompileError as error:
                warnings.warn(f"the Triton backend is used instead: {error}", stacklevel=3)
                self._failed = True
                return None
        return found  # type: ignore[return-value]


def _elsewhere(x: Tensor) -> bool:
    """Whether launches would go to another GPU than the tensor's."""
    return x.device.index != torch.cuda.current_device()


def _capture() -> int:
    """Number of the graph capture under way, 0 if none: each must share out its own work."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    return int(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)[2])
