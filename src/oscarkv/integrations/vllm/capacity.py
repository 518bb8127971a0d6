"""How many tokens a memory holds: blocks counted as vLLM counts them. Imports no vLLM.

Every block, of packed history, of exact windows or of vLLM's own cache, has the bytes of 16
unpacked tokens of a layer, and all draw on one pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscarkv.codec.layout import PAGE_QUANTUM, PageLayout
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.serving.windows import SLACK, TURN, WindowRule, blocks_for
from oscarkv.integrations.vllm.settings import page_layout
from oscarkv.recipe import Recipe

#: Steps under way at once with vLLM's asynchronous scheduling, its default.
BATCHES = 2


@dataclass(frozen=True)
class WindowBlocks(WindowRule):
    """Blocks of exact tokens that one request of vLLM's takes."""

    def admission(self, max_model_len: int, in_flight: int, batches: int) -> int:
        """What a request holds at most, while its prompt is read: the sink, the end of each
        chunk under way, and the end of the one before, which the first chunk's queries read.
        Never more than there is from the oldest token that is still read. For other requests
        also the end of the prompt before its last turn, and of two shared prefixes: one that was
        found, and a longer one."""
        more = max(SLACK, self.page)
        ends = (batches + 1) * self.tail(more) + self.blocks(TURN)
        held = min(ends, self.tail(more + in_flight)) + 2 * self.shared
        return min(self.sink_blocks + held, self.blocks(max_model_len))


@dataclass(frozen=True)
class Capacity:
    """One rank's cache, with every layer packed, against the same model's cache in its dtype."""

    layers: int
    heads: int  # KV heads of the rank
    head_dim: int
    dtype: torch.dtype
    recipe: Recipe
    max_model_len: int

    @property
    def layout(self) -> PageLayout:
        return page_layout(self.recipe, self.head_dim, self.dtype)

    @property
    def windows(self) -> WindowBlocks:
        return WindowBlocks(self.recipe.sink, self.recipe.recent, self.layout.page_size)

    @property
    def block_bytes(self) -> int:
        """One block, in every layer."""
        return self.layers * self.heads * window_page_bytes(self.head_dim, self.dtype)

    @property
    def request_blocks(self) -> int:
        """What a request of the longest length is charged."""
        history = blocks_for(self.max_model_len, self.layout.page_size)
        return history + self.windows.charged(self.max_model_len)

    @property
    def plain_request_blocks(self) -> int:
        return blocks_for(self.max_model_len)

    @property
    def gain(self) -> float:
        """How many times the tokens of an unpacked cache the same memory holds."""
        return self.plain_request_blocks / self.request_blocks

    @property
    def bits(self) -> float:
        """Bits an element that a request of the longest length reserves: codes, parameters,
        padding, windows and the packed copies of what is in them."""
        taken = PAGE_QUANTUM * self.request_blocks  # in unpacked tokens
        return 8 * self.dtype.itemsize * taken / self.max_model_len

    def blocks(self, memory: int) -> int:
        return memory // self.block_bytes

    def tokens(self, memory: int) -> int:
        """vLLM's "KV cache size": requests of the longest length that fit, times that length."""
        return int(self.blocks(memory) / self.request_blocks * self.max_model_len)

    def plain_tokens(self, memory: int) -> int:
        return int(self.blocks(memory) / self.plain_request_blocks * self.max_model_len)

    def figures(self, memory: int) -> dict[str, int]:
        return {"blocks": self.blocks(memory)}

    def request_bytes(self, tokens: int) -> int:
        """What one request takes at most, while its prompt is read."""
        prompt = self.windows.admission(tokens, in_flight=tokens, batches=BATCHES)
        needed = blocks_for(tokens, self.layout.page_size) + prompt + 1  # vLLM keeps one back
        return needed * self.block_bytes

    def usable_bytes(self, memory: int) -> int:
        return self.blocks(memory) * self.block_bytes
