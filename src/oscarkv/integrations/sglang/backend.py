"""Attention: a step is planned from SGLang's tables, every layer stores and reads through it.

Tables are built from SGLang's rows of slots, once a step and without waiting for the device. For
CUDA graphs they are buffers that stay where they are: a step only fills them anew. Padded rows are
those whose slot lies in page 0: they get no tokens and no length, and write nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError, UnsupportedModelError
from oscarkv.integrations.serving import refusal
from oscarkv.integrations.serving.layers import layer_cache, rank_heads, rank_transforms
from oscarkv.integrations.serving.windows import blocks_for
from oscarkv.integrations.sglang import options
from oscarkv.integrations.sglang.check import verify
from oscarkv.integrations.sglang.pool import OscarPool
from oscarkv.kernels import LayerCache, get_backend


@dataclass
class Step:
    """What kernels are given of a step."""

    seq_lens: Tensor  # int32 [B]
    query_start_loc: Tensor  # int32 [B + 1]
    history_table: Tensor  # int32 [B, pages]
    window_table: Tensor  # int32 [B, blocks]
    history_slots: Tensor  # int64 [tokens]
    window_slots: Tensor


class OscarAttention(AttentionBackend):  # type: ignore[misc]
    def __init__(self, runner: Any) -> None:
        super().__init__()
        try:
            verify(runner)
            settings, pool = options.settings_of(runner.server_args), runner.token_to_kv_pool
            assert settings is not None
            assert isinstance(pool, OscarPool)
            self.device = pool.window_of.device
            self.decoding = get_backend(settings.backend, self.device)
            self.prefilling = get_backend(settings.backend, self.device)
            self.writing = get_backend(settings.backend, self.device)
        except OscarError as error:
            refusal.refuse(error)
        self.settings, self.pool = settings, pool
        self.page = pool.page_size
        self.rows = runner.req_to_token_pool.req_to_token
        self.decoding.reserve(self.rows.shape[0])  # graphs of fewer are captured as well
        self.layers: dict[int, LayerCache] = {}
        self.graph: Step | None = None
        self.step: Step | None = None

    # -- a step --------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Outside of graphs: tables as wide as the longest sequence."""
        batch = forward_batch
        if batch.forward_mode.is_decode():
            longest, new = int(batch.seq_lens_cpu.max()), 1
            starts = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=self.device)
        else:
            longest, new = int(batch.seq_lens_cpu.max()), max(batch.extend_seq_lens_cpu)
            starts = torch.zeros(batch.batch_size + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(batch.extend_seq_lens, 0, out=starts[1:])
        lengths = batch.seq_lens.to(torch.int32)
        self.step = Step(
            lengths,
            starts,
            self._history(batch.req_pool_indices, lengths, blocks_for(longest, self.page)),
            self._windows(batch.req_pool_indices, lengths, blocks_for(longest)),
            *self._slots(batch.out_cache_loc),
        )
        backend = self.decoding if batch.forward_mode.is_decode() else self.prefilling
        self._plan(backend, self.step, new)

    def _plan(self, backend: Any, step: Step, new: int) -> None:
        backend.plan(
            step.seq_lens,
            step.query_start_loc,
            step.history_table,
            step.window_table,
            self.settings.strict,
            new,
        )

    def _history(self, rows: Tensor, lengths: Tensor, width: int) -> Tensor:
        slots = self.rows[rows, :: self.page][:, :width]
        return self._within(slots // self.page, lengths, self.page)

    def _windows(self, rows: Tensor, lengths: Tensor, width: int) -> Tensor:
        slots = self._within(self.rows[rows, ::PAGE_QUANTUM][:, :width], lengths, PAGE_QUANTUM)
        return self.pool.window_of[slots // PAGE_QUANTUM]

    def _within(self, table: Tensor, lengths: Tensor, size: int) -> Tensor:
        """Entries that hold one of a sequence's tokens; 0 for the others, which are of requests
        that had the row before."""
        first = torch.arange(table.shape[1], device=table.device) * size
        return torch.where(first < lengths[:, None], table, 0).to(torch.int32)

    def _slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.pool.window_of[slots // PAGE_QUANTUM].long()
        real = torch.where(slots >= self.page, slots, -1)
        return real, windows * PAGE_QUANTUM + slots % PAGE_QUANTUM

    # -- CUDA graphs ---------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        context = self.rows.shape[1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.graph = Step(
            zeros(max_bs),
            zeros(max_bs + 1),
            zeros(max_bs, blocks_for(context, self.page)),
            zeros(max_bs, blocks_for(context)),
            zeros(max_num_tokens, dtype=torch.int64),
            zeros(max_num_tokens, dtype=torch.int64),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        batch, whole = forward_batch, self.graph
        assert whole is not None, "graphs were not prepared"
        n = batch.batch_size
        step = Step(
            whole.seq_lens[:n],
            whole.query_start_loc[: n + 1],
            whole.history_table[:n],
            whole.window_table[:n],
            whole.history_slots[:n],
            whole.window_slots[:n],
        )
        slots = batch.out_cache_loc[:n]  # replaying, without the rows that only fill up the graph
        slots = torch.nn.functional.pad(slots, (0, n - slots.shape[0]))
        live = slots >= self.page
        rows = torch.where(live, batch.req_pool_indices[:n], 0)
        step.seq_lens.copy_(torch.where(live, batch.seq_lens[:n], 0))
        torch.cumsum(live, 0, out=step.query_start_loc[1:])
        for table, made in (
            (step.history_table, self._history(rows, step.seq_lens, step.history_table.shape[1])),
            (step.window_table, self._windows(rows, step.seq_lens, step.window_table.shape[1])),
        ):
            table[:, : made.shape[1]] = made
        history, windows = self._slots(slots)
        step.history_slots.copy_(history)
        step.window_slots.copy_(windows)
        self.step = step
        if in_capture:
            self._plan(self.decoding, step, 1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # -- a layer -------------------------------------------------------------------------------

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **_: Any) -> Tensor:  # fmt: skip
        cache = self._write(k, v, layer, save_kv_cache)
        out = torch.empty_like(q)
        shape = (-1, layer.tp_q_head_num, layer.head_dim)
        self.decoding.decode(q.view(shape), cache, out.view(shape))
        return out

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **_: Any) -> Tensor:  # fmt: skip
        cache = self._write(k, v, layer, save_kv_cache)
        out = torch.empty_like(q)
        shape = (-1, layer.tp_q_head_num, layer.head_dim)
        self.prefilling.prefill(q.view(shape), k, v, cache, out.view(shape))
        return out

    def _write(self, k: Tensor, v: Tensor, layer: Any, save: bool) -> LayerCache:
        cache, step = self._layer(layer), self.step
        assert step is not None
        if not save:
            raise OscarError("oscarkv's attention stores what it is given")
        self.writing.write(k, v, step.history_slots, step.window_slots, cache)
        return cache

    def _layer(self, layer: Any) -> LayerCache:
        if layer.layer_id not in self.layers:
            self.layers[layer.layer_id] = self._bind(layer)
        return self.layers[layer.layer_id]

    def _bind(self, layer: Any) -> LayerCache:
        artifact = self.settings.loaded
        if (
            layer.sliding_window_size > -1
            or layer.is_cross_attention
            or layer.attn_type != AttentionType.DECODER
            or {layer.qk_head_dim, layer.v_head_dim} != {artifact.model.head_dim}
        ):
            refusal.refuse(
                UnsupportedModelError(
                    "oscarkv cannot be used with this model: layer "
                    f"{layer.layer_id} has attention of another kind"
                )
            )
        total, mine = artifact.model.kv_heads, layer.tp_k_head_num
        parallel = get_parallel()
        heads = rank_heads(total, mine, parallel.attn_tp_rank, parallel.attn_tp_size)
        transforms = rank_transforms(artifact.layers[layer.layer_id], heads, self.device)
        return layer_cache(
            transforms,
            {},
            self.settings.layer_recipe(layer.layer_id),
            float(layer.scaling),
            layer.logit_cap or None,
            self.pool.layouts[layer.layer_id],
            *self.pool.layer_tensors(layer.layer_id),
        )

    def support_triton(self) -> bool:
        return bool(self.device.type != "cpu")
