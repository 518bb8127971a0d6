"""What vLLM asks an attention backend about its cache.

A page of P packed tokens is one "state" of P tokens to vLLM: the cache arrives as
[blocks, heads, 1, bytes] whatever layout vLLM chose, and a page has exactly the bytes of a window
page of 16 tokens, so that both groups draw on one pool of blocks. Pages of layers with more bits
(oscarkv tune) are larger; vLLM then packs all layers' pages side by side into a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.settings import page_layout
from oscarkv.integrations.vllm.windows import cache_layouts, page_sizes


class OscarBackend(AttentionBackend):  # type: ignore[misc]
    """Packed history, with exact windows in the companion group."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
    #: Where it is the model's own, which `check_config` sees to.
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

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
        return page_sizes(kv_cache_spec)

    # On CUDA vLLM asks these about every layer as it is built, before the layer is known to keep
    # vLLM's own attention: yes to what `kept.py` hands over. Other types of attention and
    # multimodal prefixes are no such thing: vLLM wraps the backend of the first, and the second
    # are a matter of all layers, the packed ones too.

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Of an FP8 cache that a checkpoint asks for; asked even if `--kv-cache-dtype` declines
        that cache, which is the only way to get here."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cache_layouts()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        layout = page_layout(layers.active().recipe, spec.head_size, spec.dtype)
        room = window_page_bytes(spec.head_size, spec.dtype)
        return dataclasses.replace(
            spec,
            block_size=layout.page_size,
            tokens_per_state=layout.page_size,
            state_content_bytes=spec.state_content_bytes or room,  # a layer with more bits asked
            dtype=torch.uint8,
        )
