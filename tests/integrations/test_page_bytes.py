"""Bytes of pages where layers have bits of their own, as both engines count them."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscarkv.codec import PageLayout
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.sglang import capacity as sglang
from oscarkv.integrations.vllm import capacity as vllm
from oscarkv.integrations.vllm.settings import page_bytes, page_layout
from oscarkv.recipe import Recipe

BITS = st.lists(st.tuples(st.sampled_from((2, 3, 4)), st.sampled_from((2, 3, 4))), max_size=8)
DIMS = st.sampled_from((64, 128, 256))
TYPES = st.sampled_from((torch.bfloat16, torch.float32))
COMPACT = Recipe.named("compact")


def recipes(bits: list[tuple[int, int]]) -> tuple[Recipe, ...]:
    return tuple(COMPACT.replace(key_bits=k, value_bits=v) for k, v in bits if (k, v) != (2, 2))


@given(BITS, st.integers(1, 8), DIMS, TYPES)
def test_pages_hold_their_tokens_and_make_no_pattern(
    bits: list[tuple[int, int]], even: int, dim: int, dtype: torch.dtype
) -> None:
    size = page_layout(COMPACT, dim, dtype).page_size
    layouts = [PageLayout.of(r, dim, size) for r in (*recipes(bits), *[COMPACT] * even)]
    sizes = page_bytes(layouts, dtype)
    for found, layout in zip(sizes, layouts, strict=True):
        assert found % 16 == 0
        least = max(layout.bytes, window_page_bytes(dim, dtype))
        assert least <= found <= least + 16
    counts = Counter(sizes)
    if len(counts) > 1 and max(counts.values()) > 1:  # of single layers any sizes make a pattern
        assert len(set(counts.values())) > 1


@given(BITS, st.integers(1, 8), DIMS, TYPES)
def test_more_bits_hold_fewer_tokens(
    bits: list[tuple[int, int]], even: int, dim: int, dtype: torch.dtype
) -> None:
    others, memory = recipes(bits), 1 << 30
    layers = even + len(others)
    for capacity in (vllm.Capacity, sglang.Capacity):
        plain = capacity(layers, 2, dim, dtype, COMPACT, 32768)
        mixed = capacity(layers, 2, dim, dtype, COMPACT, 32768, others)
        assert mixed.layout == plain.layout
        assert mixed.tokens(memory) <= plain.tokens(memory)
        assert mixed.plain_tokens(memory) == plain.plain_tokens(memory)
        assert (mixed.bits > plain.bits) == bool(others)
        assert mixed.gain * mixed.bits == pytest.approx(plain.gain * plain.bits, rel=0.01)
