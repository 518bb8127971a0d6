"""How many tokens a memory holds: blocks counted as vLLM counts them. Imports no vLLM.

Every block, of packed history, of exact windows or of vLLM's own cache, has the bytes of 16
unpacked tokens of a layer, and all draw on one pool. With layers of more bits blocks
are as large as the largest of those layers' pages make them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscarkv.codec.layout import PAGE_QUANTUM, PageLayout
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.serving.windows import SLACK, TURN, WindowRule, blocks_for
from oscarkv.integrations.vllm.settings import page_bytes, page_layout
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
    others: tuple[Recipe, ...] = ()  # of layers with other bits

    @property
    def layout(self) -> PageLayout:
        """Of layers that have the recipe's bits; all layers have pages of as many tokens."""
        return page_layout(self.recipe, self.head_dim, self.dtype)

    @property
    def windows(self) -> WindowBlocks:
        return WindowBlocks(self.recipe.sink, self.recipe.recent, self.layout.page_size)

    @property
    def block_bytes(self) -> int:
        """One block, in every layer."""
        size = self.layout.page_size
        layouts = [self.layout] * (self.layers - len(self.others))
        layouts += [PageLayout.of(other, self.head_dim, size) for other in self.others]
        return self.heads * sum(page_bytes(layouts, self.dtype))

    @property
    def plain_block_bytes(self) -> int:
        """16 unpacked tokens in every layer."""
        return self.layers * self.heads * window_page_bytes(self.head_dim, self.dtype)

    @property
    def larger(self) -> float:
        """How many times the bytes of 16 unpacked tokens a block takes: more than 1 with layers of
        more bits."""
        return self.block_bytes / self.plain_block_bytes

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
        return self.plain_request_blocks / (self.request_blocks * self.larger)

    @property
    def bits(self) -> float:
        """Bits an element that a request of the longest length reserves: codes, parameters,
        padding, windows and the packed copies of what is in them."""
        taken = PAGE_QUANTUM * self.request_blocks * self.larger  # in unpacked tokens
        return 8 * self.dtype.itemsize * taken / self.max_model_len

    def blocks(self, memory: int) -> int:
        return memory // self.block_bytes

    def tokens(self, memory: int) -> int:
        """vLLM's "KV cache size": requests of the longest length that fit, times that length."""
        return int(self.blocks(memory) / self.request_blocks * self.max_model_len)

    def plain_tokens(self, memory: int) -> int:
        blocks = memory // self.plain_block_bytes
        return int(blocks / self.plain_request_blocks * self.max_model_len)

    def figures(self, memory: int) -> dict[str, int]:
        return {"blocks": self.blocks(memory)}

    def request_bytes(self, tokens: int) -> int:
        """What one request takes at most, while its prompt is read."""
        prompt = self.windows.admission(tokens, in_flight=tokens, batches=BATCHES)
        needed = blocks_for(tokens, self.layout.page_size) + prompt + 1  # vLLM keeps one back
        return needed * self.block_bytes

    def usable_bytes(self, memory: int) -> int:
        return self.blocks(memory) * self.block_bytes
