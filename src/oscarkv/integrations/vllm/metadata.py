"""vLLM's description of a step, kept as the tensors a plan needs. Nothing waits for the device.

Lengths and tables are vLLM's own buffers, which lie at the same addresses in every step: a captured
graph that is replayed reads what vLLM wrote there since. Its rows beyond the batch have no new
tokens (and length 0), its slots beyond the batch are -1: kernels take both for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from oscarkv.integrations.vllm.settings import settings_of


@dataclass
class HistoryMetadata(AttentionMetadata):  # type: ignore[misc]
    """Decodes come first in the batch, prompts and their chunks after them."""

    tokens: int
    decodes: int  # sequences
    decode_tokens: int
    max_query_len: int  # at least the longest sequence's number of new tokens
    max_decode_len: int  # the same of the decodes
    query_start_loc: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B]
    table: Tensor  # int32 [B, pages]
    group: str = ""  # names the layers that share the table: one of them


@dataclass
class WindowMetadata(AttentionMetadata):  # type: ignore[misc]
    table: Tensor  # int32 [B, blocks]


class HistoryBuilder(AttentionMetadataBuilder[HistoryMetadata]):  # type: ignore[misc]
    #: Graphs hold decodes of equal length: one token, or that and the drafts.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        settings = settings_of(vllm_config)
        if settings is not None and settings.backend == "torch":  # it waits for the device
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HistoryMetadata:
        common, longest = common_attn_metadata, self.reorder_batch_threshold or 1
        decodes, _, decode_tokens, _ = split_decodes_and_prefills(common, longest)
        return HistoryMetadata(
            common.num_actual_tokens,
            decodes,
            decode_tokens,
            common.max_query_len,
            min(common.max_query_len, longest),
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            self.layer_names[0],
        )


class WindowBuilder(AttentionMetadataBuilder[WindowMetadata]):  # type: ignore[misc]
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WindowMetadata:
        return WindowMetadata(common_attn_metadata.block_table_tensor)
