"""How many tokens a memory holds: blocks counted as vLLM counts them. Imports no vLLM.

Every block, of packed history, of exact windows or of vLLM's own cache, has the bytes of 16
unpacked tokens of a layer, and all draw on one pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscarkv.codec.layout import PAGE_QUANTUM, PageLayout
from oscarkv.integrations.vllm.settings import page_layout, window_page_bytes
from oscarkv.recipe import Recipe

#: Tokens by which a step may be rolled back (rejected drafts) with its windows still there.
SLACK = 16
#: Tokens at the end of a prompt that another one may replace and still find all before them:
#: one question after a document that the next question is about, too.
TURN = 256


def blocks_for(tokens: int, size: int = PAGE_QUANTUM) -> int:
    return -(-tokens // size)


@dataclass(frozen=True)
class WindowBlocks:
    """Blocks of exact tokens that one request takes."""

    sink: int
    recent: int
    page: int  # tokens of a history page, where prefix hits end

    @property
    def sink_blocks(self) -> int:
        return blocks_for(self.sink)

    @property
    def shared(self) -> int:
        """What a hit reads behind the sink: held to the end where a prompt leaves a prefix that
        it shares with others."""
        return blocks_for(self.recent - 1)  # a hit ends with a block

    def _tail(self, more: int) -> int:
        return blocks_for(self.recent + more) + 1  # a window begins anywhere in a block

    def charged(self, max_model_len: int) -> int:
        """What a request holds while it decodes, and its share of what prompts take meanwhile.

        Few prompts are read at once: charging every request for two ends of chunks would cost a
        tenth of the capacity. Admission counts the real maximum, below."""
        blocks = self.sink_blocks + self._tail(SLACK) + self.page // PAGE_QUANTUM
        return min(blocks, blocks_for(max_model_len))

    def admission(self, max_model_len: int, in_flight: int, batches: int) -> int:
        """What a request holds at most, while its prompt is read: the sink, the end of each
        chunk under way, and the end of the one before, which the first chunk's queries read.
        Never more than there is from the oldest token that is still read. For other requests
        also the end of the prompt before its last turn, and of two shared prefixes: one that was
        found, and a longer one."""
        more = max(SLACK, self.page)
        ends = (batches + 1) * self._tail(more) + blocks_for(TURN)
        held = min(ends, self._tail(more + in_flight)) + 2 * self.shared
        return min(self.sink_blocks + held, blocks_for(max_model_len))


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
