"""`write`, `decode` and `prefill` on NVIDIA GPUs, graph-safe: nothing waits for the device."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

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


class _Bound(NamedTuple):
    """A layer's kernel for tensors of one shape, found once: looking for it again in every layer
    and step takes longer than a launch. The layer is not kept alive by it."""

    layer: weakref.ref[LayerCache]
    kernel: Any
    arguments: Any
    work: Hashable = None  # what decides how a step's work is shared out


#: Prompts have any length, and each is a shape of its own; steps of decoding are few.
MOST_BOUND = 4096


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
        self._bound: dict[Hashable, _Bound] = {}
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
        shapes = (id(layer), k.shape, k.dtype, k.stride(), v.dtype, v.stride())
        bound = self._bound.get(shapes)
        if bound is None or bound.layer() is not layer or not write.aligned(k, v):
            bound = self._bind_write(shapes, k, v, layer)
        if bound is None:
            return self._portable.write(k, v, history_slots, window_slots, layer)
        return bound.kernel.run(bound.arguments, k, v, history_slots, window_slots, layer)

    def _bind_write(
        self, shapes: Hashable, k: Tensor, v: Tensor, layer: LayerCache
    ) -> _Bound | None:
        if self._failed or write.unsupported(k, v, layer) is not None:
            return None
        geometry = write.Geometry.of(k, layer)
        key = (geometry, k.device)
        kernel = self._kernel(key, lambda: write.WriteKernel(geometry, k.device))
        if kernel is None:
            return None
        return self._remember(
            shapes, _Bound(weakref.ref(layer), kernel, kernel.arguments(k, v, layer))
        )

    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        plan = self._plan
        if plan is None:
            raise CacheError("call plan() before write(), decode() or prefill()")
        if not q.shape[0]:
            return None
        if _elsewhere(q):
            with torch.cuda.device(q.device):
                return self.decode(q, layer, out)
        shapes = (
            id(layer),
            q.shape,
            q.dtype,
            q.stride(),
            out.dtype,
            out.stride(),
            plan.max_query_len,
            layer.soft_cap is None,
        )
        bound = self._bound.get(shapes)
        if bound is None or bound.layer() is not layer or not decode.aligned(q):
            bound = self._bind_decode(shapes, plan, q, out, layer)
        if bound is None:
            return self._portable.decode(q, layer, out)
        kernel, arguments = bound.kernel, bound.arguments
        kernel.renew(arguments, plan, layer, self._sequences)
        moment = (bound.work, _capture())
        if moment not in self._shared_out:
            kernel.plan(arguments)
            self._shared_out.add(moment)
        return kernel.run(arguments, q, out)

    def _bind_decode(
        self, shapes: Hashable, plan: Plan, q: Tensor, out: Tensor, layer: LayerCache
    ) -> _Bound | None:
        if self._failed or decode.unsupported(q, out, layer) is not None:
            return None
        geometry = decode.Geometry.of(q, layer, plan.max_query_len)
        windows = (layer.sink, layer.recent, layer.sliding_window)
        key = (geometry, layer.kv_heads, q.shape[1], windows, plan.max_query_len, q.device)
        kernel = self._kernel(key, lambda: decode.DecodeKernel(geometry, q.device))
        if kernel is None:
            return None
        arguments = kernel.arguments(plan, layer, q.shape[1])
        return self._remember(shapes, _Bound(weakref.ref(layer), kernel, arguments, key))

    def _remember(self, shapes: Hashable, bound: _Bound) -> _Bound:
        if len(self._bound) >= MOST_BOUND:
            self._bound.clear()
        self._bound[shapes] = bound
        return bound

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        self._portable.prefill(q, k, v, layer, out)

    def _kernel(self, key: Hashable, make: Callable[[], _Kernel]) -> _Kernel | None:
        """A kernel, compiled and loaded at first use; None, after a warning, if that fails."""
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
