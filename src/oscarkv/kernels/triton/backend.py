"""`TritonBackend`: the interface, on Triton kernels. Only `plan` may wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.errors import CacheError
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.kernels.triton.decode import decode
from oscarkv.kernels.triton.write import write


class TritonBackend:
    """Every GPU that Triton knows; the oracle is the torch backend."""

    name = "triton"
    write_batch = 1

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def reserve(self, sequences: int) -> None:
        pass  # a captured graph has working memory of its own

    def plan(
        self,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        strict: bool = False,
        max_query_len: int | None = None,
    ) -> None:
        batch = seq_lens.shape[0]
        if query_start_loc.shape[0] != batch + 1:
            raise CacheError("plan: query_start_loc must have one entry more than seq_lens")
        if max_query_len is None:  # the one place that waits for the device
            max_query_len = int(query_start_loc.diff().max()) if batch else 0
        self._plan = Plan(
            seq_lens, query_start_loc, history_table, window_table, strict, max_query_len
        )

    def planned(self) -> Plan:
        if self._plan is None:
            raise CacheError("call plan() before decode() or prefill()")
        return self._plan

    @torch.inference_mode()
    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        write(k, v, history_slots, window_slots, layer)

    @torch.inference_mode()
    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        decode(self.planned(), q, layer, out)

    @torch.inference_mode()
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        from oscarkv.kernels.triton.prefill import prefill

        plan = self.planned()
        if _gathers_wide_rows(layer):
            oracle = TorchBackend()
            oracle.plan(
                plan.seq_lens,
                plan.query_start_loc,
                plan.history_table,
                plan.window_table,
                plan.strict,
            )
            oracle.prefill(q, k, v, layer, out)
            return
        prefill(plan, q, k, v, layer, out)


def _gathers_wide_rows(layer: LayerCache) -> bool:
    """Prefill gathers 3-bit codes. On an H200 with Triton 3.6 its kernel for 256 columns of them
    read where it must not, so torch reads those prompts, and waits for the device meanwhile."""
    layout = layer.layout
    return 3 in (layout.key_bits, layout.value_bits) and layout.head_dim > 128
