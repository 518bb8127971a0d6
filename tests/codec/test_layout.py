"""Where the bits are: rows against a bit-by-bit implementation, pages against their drawing."""

import pytest
import torch
from codec_reference import channel_of, pack
from helpers import generator
from hypothesis import given, settings
from hypothesis import strategies as st

from oscarkv.codec import PageLayout, RowLayout
from oscarkv.codec.layout import ALIGNMENT, PAGE_QUANTUM
from oscarkv.errors import RecipeError
from oscarkv.recipe import CODE_BITS, PARAMETER_BITS, Recipe

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
row_layouts = st.builds(RowLayout, st.sampled_from(HEAD_DIMS), st.sampled_from(CODE_BITS))
page_layouts = st.builds(
    PageLayout,
    st.sampled_from((16, 32, 48, 128, 256)),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(CODE_BITS),
    st.sampled_from(CODE_BITS),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(sorted(PARAMETER_BITS)),
)


def random_codes(layout: RowLayout, *shape: int, seed: int = 0) -> torch.Tensor:
    rng = generator(seed)
    return torch.randint(
        0, 1 << layout.bits, (*shape, layout.head_dim), generator=rng, dtype=torch.uint8
    )


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_row_equals_the_bit_by_bit_rule_and_unpacks(head_dim: int, bits: int) -> None:
    layout = RowLayout(head_dim, bits)
    codes = random_codes(layout, 3, 2)
    packed = layout.pack(codes)
    for i in range(3):
        for j in range(2):
            assert bytes(packed[i, j].tolist()) == pack(codes[i, j].tolist(), bits)
    assert torch.equal(layout.unpack(packed), codes)
    columns = layout.unpack_columns(packed, torch.float32)  # [3, d, 2]
    assert torch.equal(columns.mT.to(torch.uint8), codes)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_each_channel_owns_its_own_bits(head_dim: int, bits: int) -> None:
    layout = RowLayout(head_dim, bits)
    full = torch.eye(head_dim, dtype=torch.uint8) * ((1 << bits) - 1)
    words = [int.from_bytes(bytes(row), "little") for row in layout.pack(full).tolist()]
    seen = 0
    for word in words:
        assert word.bit_count() == bits
        assert not seen & word
        seen |= word


def test_head_dim_128_at_2_bits_is_channel_16p_8e_w() -> None:
    layout = RowLayout(128, 2)
    assert layout.bytes == 32
    for p, e, w in ((0, 0, 0), (0, 0, 7), (0, 1, 0), (1, 0, 0), (7, 1, 7), (3, 1, 5)):
        assert channel_of(w, e, p, 8) == 16 * p + 8 * e + w
        codes = torch.zeros(128, dtype=torch.uint8)
        codes[16 * p + 8 * e + w] = 3
        words = layout.pack(codes).view(torch.int32).tolist()
        expected = [0] * 8
        expected[w] = 3 << (16 * e + 2 * p)
        assert [word % (1 << 32) for word in words] == expected


def test_three_bit_rows_are_a_2_bit_plane_and_then_a_1_bit_plane() -> None:
    codes = random_codes(RowLayout(96, 3))
    packed = RowLayout(96, 3).pack(codes)
    low = RowLayout(96, 2).pack(codes & 3)
    assert torch.equal(packed[:24], low)
    assert packed.shape[0] == 24 + 12
    high = [
        int.from_bytes(bytes(packed[24 + 4 * w : 28 + 4 * w].tolist()), "little") for w in (0, 1, 2)
    ]
    for channel in range(96):  # slot p of half e of word w is channel (2p + e) 3 + w
        slot_half, word = divmod(channel, 3)
        bit = high[word] >> (16 * (slot_half % 2) + slot_half // 2) & 1
        assert bit == int(codes[channel]) >> 2


@given(row_layouts, st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_rows_pack_alike_alone_and_in_a_batch(layout: RowLayout, seed: int) -> None:
    codes = random_codes(layout, 5, seed=seed)
    alone = torch.stack([layout.pack(row) for row in codes])
    assert torch.equal(layout.pack(codes), alone)
    assert torch.equal(layout.unpack(alone[2]), codes[2])


def test_a_hand_computed_row() -> None:
    # d = 16, 2 bits: W = 16 * 2 / 32 = 1 word, so channel = 2 p + e: even channels in the low
    # half, odd ones in the high half. Codes 0 1 2 3 0 1 2 3 ...:
    #   low half:  channels 0 2 4 6 8 .. = 0 2 0 2 .. at bits 0 2 4 6 ..  -> 10 00 10 00 .. = 0x8888
    #   high half: channels 1 3 5 7 9 .. = 1 3 1 3 ..                     -> 11 01 11 01 .. = 0xDDDD
    codes = torch.tensor([0, 1, 2, 3] * 4, dtype=torch.uint8)
    assert bytes(RowLayout(16, 2).pack(codes).tolist()) == bytes([0x88, 0x88, 0xDD, 0xDD])


@pytest.mark.parametrize("head_dim", [0, 8, 40, 100])
def test_head_dims_that_are_no_multiple_of_16_are_refused(head_dim: int) -> None:
    with pytest.raises(RecipeError, match=f"head_dim {head_dim}"):
        RowLayout(head_dim, 2)


@pytest.mark.parametrize("page_size", [0, 8, 17, 272])
def test_odd_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(RecipeError, match=f"page size {page_size}"):
        PageLayout.of(Recipe(), 128, page_size)


@given(page_layouts)
@settings(deadline=None, max_examples=30)
def test_sections_follow_each_other_aligned_and_padded_last(layout: PageLayout) -> None:
    kb = sum(
        4 * -(-layout.head_dim * b // 32)
        for b in ((2, 1) if layout.key_bits == 3 else (layout.key_bits,))
    )
    assert layout.key_row.bytes == kb
    assert layout.parameter_bytes * 8 == layout.groups * PARAMETER_BITS[layout.parameter_format]
    sizes = (kb, layout.value_row.bytes, layout.parameter_bytes, layout.parameter_bytes)
    start = 0
    for offset, size in zip(layout.offsets, sizes, strict=False):
        assert offset == start
        assert offset % PAGE_QUANTUM == 0  # a page of 16 rows or more: wide loads stay aligned
        start += size * layout.page_size
    assert layout.offsets[-1] == start
    assert start <= layout.bytes < start + ALIGNMENT
    assert layout.bytes % ALIGNMENT == 0


def test_a_128_page_of_head_dim_128_has_the_documented_offsets() -> None:
    layout = PageLayout.of(Recipe(), 128, 128)
    assert layout.offsets == (0, 4096, 8192, 8704, 9216)  # 32 + 32 + 4 + 4 bytes a token
    assert layout.bytes == 9216


@given(page_layouts)
@settings(deadline=None, max_examples=20)
def test_sections_are_views_that_cover_the_data_once(layout: PageLayout) -> None:
    pages = torch.zeros(2, 3, layout.bytes, dtype=torch.uint8)
    for section in layout.sections(pages):
        assert section.shape[:3] == (2, 3, layout.page_size)
        section += 1
    assert bool((pages[..., : layout.offsets[-1]] == 1).all())
    assert bool((pages[..., layout.offsets[-1] :] == 0).all())
