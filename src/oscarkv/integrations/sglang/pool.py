"""The memory: one tensor of pages a layer. A page holds packed tokens, or 16 exact ones."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving import refusal
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.sglang import options
from oscarkv.integrations.sglang.capacity import Capacity
from oscarkv.integrations.sglang.check import check_memory


class OscarPool(MHATokenToKVPool):  # type: ignore[misc]
    """Page 0 is SGLang's for padding, and stands for "no window" in tables."""

    def _create_buffers(self) -> None:
        settings = options.active()
        assert settings is not None
        if self.post_capture_active:
            refusal.refuse(OscarError("oscarkv cannot be used with caches sized after capture"))
        self.capacity = Capacity(
            self.layer_num,
            self.head_num,
            self.head_dim,
            self.dtype,
            settings.recipe,
            options.longest(),
            settings.others,
        )
        self.rule = self.capacity.windows
        recipes = (settings.layer_recipe(layer) for layer in range(self.layer_num))
        self.layouts = [self.capacity.layout_of(recipe) for recipe in recipes]
        if self.page_size != self.rule.page:
            found = f"pages hold {self.rule.page} tokens, and SGLang's {self.page_size}"
            refusal.refuse(OscarError(f"oscarkv's plugin did not take effect: {found}"))
        self.window_pages = self.capacity.window_pages(self.size)
        try:
            check_memory(self)
        except OscarError as error:
            refusal.refuse(error)
        pages = self.size // self.page_size + self.window_pages + 1
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.k_buffer = [
                torch.zeros(
                    pages, self.head_num, layout.bytes, dtype=torch.uint8, device=self.device
                )
                for layout in self.layouts
            ]
        room = window_page_bytes(self.head_dim, self.dtype)
        self.v_buffer = [layer[..., :room].view(self.dtype) for layer in self.k_buffer]
        units = pages * (self.page_size // PAGE_QUANTUM)
        #: Of every 16 slots the page that has their exact copy; 0: none.
        self.window_of = torch.zeros(units, dtype=torch.int32, device=self.device)

    def layer_tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        index = layer - self.start_layer
        return self.k_buffer[index], self.v_buffer[index]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """All of it is keys and values together."""
        return sum(layer.nbytes for layer in self.k_buffer) + self.window_of.nbytes, 0

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        raise OscarError("oscarkv's cache is written by its own attention only")
