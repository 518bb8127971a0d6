"""What vLLM asks an attention backend about its cache.

A page of P packed tokens is one "state" of P tokens to vLLM: the cache arrives as
[blocks, heads, 1, bytes] whatever layout vLLM chose, and a page has exactly the bytes of a window
page of 16 tokens, so that both groups draw on one pool of blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.settings import page_layout


class OscarBackend(AttentionBackend):  # type: ignore[misc]
    """Packed history, with exact windows in the companion group."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        from oscarkv.integrations.vllm.impl import OscarImpl

        return OscarImpl

    @staticmethod
    def get_builder_cls() -> type:
        from oscarkv.integrations.vllm.metadata import HistoryBuilder

        return HistoryBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return [MultipleOf(PAGE_QUANTUM)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        layout = page_layout(layers.active().recipe, spec.head_size, spec.dtype)
        return dataclasses.replace(
            spec,
            block_size=layout.page_size,
            tokens_per_state=layout.page_size,
            state_content_bytes=window_page_bytes(spec.head_size, spec.dtype),
            dtype=torch.uint8,
        )
