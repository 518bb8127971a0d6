"""How many tokens a memory holds, counted as SGLang counts them. Imports no SGLang.

A page holds packed tokens, or 16 exact ones and some bytes that are left over; all come from one
pool. SGLang's count is of packed tokens: what the pool has beyond them is for windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oscarkv.codec.layout import PageLayout
from oscarkv.integrations.serving.windows import WindowRule, blocks_for
from oscarkv.integrations.sglang.options import page_layout
from oscarkv.recipe import Recipe


@dataclass(frozen=True)
class Capacity:
    """One rank's cache against the same model's cache in its dtype."""

    layers: int
    heads: int  # KV heads of the rank
    head_dim: int
    dtype: torch.dtype
    recipe: Recipe
    max_model_len: int
    others: tuple[Recipe, ...] = ()  # of layers with other bits

    @property
    def layout(self) -> PageLayout:
        """Of layers that have the recipe's bits. All layers have pages of as many tokens, so many
        that the smallest has room for a window page."""
        recipes = (self.recipe, *self.others)
        smallest = min(recipes, key=lambda recipe: recipe.history_bits(self.head_dim))
        size = page_layout(smallest, self.head_dim, self.dtype).page_size
        return PageLayout.of(self.recipe, self.head_dim, size)

    def layout_of(self, recipe: Recipe) -> PageLayout:
        """Of a layer's own recipe."""
        return PageLayout.of(recipe, self.head_dim, self.layout.page_size)

    @property
    def page_bytes(self) -> int:
        """One page, in every layer."""
        same = (self.layers - len(self.others)) * self.layout.bytes
        return self.heads * (same + sum(self.layout_of(other).bytes for other in self.others))

    @property
    def windows(self) -> WindowRule:
        return WindowRule(self.recipe.sink, self.recipe.recent, self.layout.page_size)

    @property
    def share(self) -> float:
        """Of windows, in pages for a page of history."""
        charged = self.windows.charged(self.max_model_len)
        return charged * self.layout.page_size / self.max_model_len

    def window_pages(self, tokens: int) -> int:
        """Pages for the windows of as many requests of the longest length as `tokens` are."""
        return int(tokens * self.windows.charged(self.max_model_len) // self.max_model_len)

    @property
    def token_bytes(self) -> int:
        """What a token costs, its share of windows included: SGLang's `cell_size`."""
        return math.ceil(self.page_bytes / self.layout.page_size * (1 + self.share))

    @property
    def plain_token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def gain(self) -> float:
        """How many times the tokens of an unpacked cache the same memory holds."""
        return self.plain_token_bytes / self.token_bytes

    @property
    def bits(self) -> float:
        """Bits an element that a request of the longest length reserves: codes, parameters,
        padding, windows and the packed copies of what is in them."""
        elements = 2 * self.layers * self.heads * self.head_dim
        return 8 * self.token_bytes / elements

    def tokens(self, memory: int) -> int:
        """SGLang's `max_total_num_tokens`: whole pages."""
        page = self.layout.page_size
        return memory // self.token_bytes // page * page

    def plain_tokens(self, memory: int) -> int:
        return memory // self.plain_token_bytes

    def request_bytes(self, tokens: int) -> int:
        """What one request takes at most, while its prompt is read."""
        pages = blocks_for(tokens, self.layout.page_size) + self.windows.at_prefill(tokens)
        return (pages + 2) * self.page_bytes

    def usable_bytes(self, memory: int) -> int:
        """Of all pages, those of windows among them."""
        tokens = self.tokens(memory)
        pages = tokens // self.layout.page_size + self.window_pages(tokens)
        return pages * self.page_bytes

    def figures(self, memory: int) -> dict[str, int]:
        tokens = self.tokens(memory)
        return {"pages": tokens // self.layout.page_size, "window_pages": self.window_pages(tokens)}
