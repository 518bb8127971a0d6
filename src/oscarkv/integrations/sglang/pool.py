"""The memory: one tensor of pages a layer. A page holds packed tokens, or 16 exact ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from oscarkv.codec import PageLayout
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving.settings import Settings, window_page_bytes
from oscarkv.integrations.serving.windows import WindowRule
from oscarkv.integrations.sglang import options


@dataclass(frozen=True)
class PoolShape:
    """How memory is shared out, for the pool and for SGLang's sizing alike."""

    layout: PageLayout
    rule: WindowRule
    context: int  # the longest request

    @classmethod
    def of(cls, settings: Settings, head_dim: int, dtype: torch.dtype, context: int) -> PoolShape:
        recipe = settings.recipe
        layout = options.page_layout(recipe, head_dim, dtype)
        return cls(layout, WindowRule(recipe.sink, recipe.recent, layout.page_size), context)

    def window_pages(self, tokens: int) -> int:
        """Pages for the windows of as many requests of the longest length as `tokens` are."""
        return tokens * self.rule.charged(self.context) // self.context

    def token_bytes(self, layers: int, heads: int) -> int:
        """What a token costs, its share of windows included."""
        page = self.rule.page
        share = 1 + page * self.rule.charged(self.context) / self.context
        return math.ceil(layers * heads * self.layout.bytes / page * share)


class OscarPool(MHATokenToKVPool):  # type: ignore[misc]
    """Page 0 is SGLang's for padding, and stands for "no window" in tables."""

    def _create_buffers(self) -> None:
        settings = options.active()
        assert settings is not None
        if self.post_capture_active:
            raise OscarError("oscarkv cannot be used with KV caches sized after graph capture")
        self.shape = PoolShape.of(settings, self.head_dim, self.dtype, options.longest())
        self.rule = self.shape.rule
        if self.page_size != self.rule.page:
            raise OscarError(
                f"pages hold {self.rule.page} tokens, and SGLang made {self.page_size}"
            )
        self.window_pages = self.shape.window_pages(self.size)
        pages = self.size // self.page_size + self.window_pages + 1
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.k_buffer = [
                torch.zeros(
                    pages,
                    self.head_num,
                    self.shape.layout.bytes,
                    dtype=torch.uint8,
                    device=self.device,
                )
                for _ in range(self.layer_num)
            ]
        room = window_page_bytes(self.head_dim, self.dtype)
        self.v_buffer = [pages[..., :room].view(self.dtype) for pages in self.k_buffer]
        units = pages * (self.page_size // PAGE_QUANTUM)
        #: Of every 16 slots the page that has their exact copy; 0: none.
        self.window_of = torch.zeros(units, dtype=torch.int32, device=self.device)

    def layer_tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        index = layer - self.start_layer
        return self.k_buffer[index], self.v_buffer[index]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """All of it is keys and values together."""
        return sum(pages.nbytes for pages in self.k_buffer) + self.window_of.nbytes, 0

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        raise OscarError("oscarkv's cache is written by its own attention only")
