"""The steps of codes.cuh in Python integers: 3-bit rows become the operands that `History` takes.

`part_channel` and `tile_channel` say which channel an operand is of; that of the queries' bytes and
of the sums' places is the same.
"""

from collections.abc import Sequence

import pytest
import torch
from helpers import generator

from oscarkv.codec.layout import RowLayout

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
LOW_BITS, WORD = 0x33333333, 0xFFFFFFFF


def mix(a: int, b: int, mask: int) -> int:
    return (a & mask) | (b & ~mask & WORD)


def permute_bytes(a: int, b: int, selector: int) -> int:
    """PTX `prmt`: a selector above 7 fills its byte with the sign of byte - 8."""
    every = (b << 32 | a).to_bytes(8, "little")
    taken = []
    for i in range(4):
        which = selector >> 4 * i & 15
        sign = 0xFF if every[which & 7] & 0x80 else 0
        taken.append(sign if which & 8 else every[which])
    return int.from_bytes(bytes(taken), "little")


def geometry(dim: int) -> tuple[int, int, int]:
    """Words of low bits and of high bits; words as the fragments see them."""
    words = dim // 16
    return words, dim // 32, 4 if words <= 4 else 8 if words <= 8 else 16


def packed_rows(dim: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Codes of some rows in channel order, and the words of the packed rows."""
    codes = torch.randint(8, (count, dim), generator=generator(dim)).to(torch.uint8)
    words = RowLayout(dim, 3).pack(codes).view(torch.int32)
    return codes.tolist(), [[word & WORD for word in row] for row in words.tolist()]


# -- keys ----------------------------------------------------------------------------------------


def key_fields(row: Sequence[int], dim: int, t: int) -> list[tuple[int, int]]:
    """`load_key`: of each word of lane t, its even and its odd slots."""
    words, high_words, padded = geometry(dim)
    fields = []
    for word in range(t * padded // 4, (t + 1) * padded // 4):
        low, high = (row[word], row[words + word % high_words]) if word < words else (0, 0)
        both = permute_bytes(high, high, 0x3232 if word // high_words % 2 else 0x1010)
        bits = mix(both, both >> 1, 0x0000FFFF)
        fields.append((mix(low, bits * 4 & WORD, LOW_BITS), mix(low >> 2, bits, LOW_BITS)))
    return fields


def part_channel(dim: int, part: int, t: int, byte: int) -> int:
    words, _, padded = geometry(dim)
    lane_words = padded // 4
    slot, word = 4 * (byte & 1) + part // lane_words, t * lane_words + part % lane_words
    return (2 * slot + byte // 2) * words + word if word < words else -1


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_parts_of_keys_are_sixteen_times_the_codes(dim: int) -> None:
    lane_words = geometry(dim)[2] // 4
    seen = set()
    (codes, *_), (row, *_) = packed_rows(dim, 1)
    for t in range(4):
        fields = key_fields(row, dim, t)
        for part in range(4 * lane_words):
            slot = part // lane_words
            x = fields[part % lane_words][slot % 2]
            x = (x if slot // 2 else x * 16 & WORD) & 0x70707070
            for byte, product in enumerate(x.to_bytes(4, "little")):
                channel = part_channel(dim, part, t, byte)
                assert product == (16 * codes[channel] if channel >= 0 else 0)
                seen.add(channel)
    assert seen - {-1} == set(range(dim))


def test_sums_of_products_of_bytes_are_floats_in_the_end() -> None:
    """`FLOAT_BITS`: sums started at the bits of 1.5 2^23 stay where a float's last bit is 1."""
    for dim, unit, levels in ((256, 16, 8), (128, 64, 4)):
        largest = dim * unit * (levels - 1)
        assert largest * 127 + (largest * 128 + 128 >> 8) < 1 << 22


# -- values --------------------------------------------------------------------------------------


def value_fields(rows: Sequence[Sequence[int]], dim: int, g: int, block: int) -> list[list[int]]:
    """`load_value` for a pair of tokens: of either half word, its even and its odd slots."""
    words, high_words, padded = geometry(dim)
    word = g & 3 if padded == 4 else 8 * block + g
    byte = g >> 2 if padded == 4 else 0
    if word >= words:
        return [[0, 0], [0, 0]]
    v = [row[word] for row in rows]
    x = [permute_bytes(*v, first + 0x1111 * byte) for first in (0x5410, 0x7632)]
    v = [row[words + word % high_words] for row in rows]
    half = word // high_words
    mine = 0x0400 + 0x0101 * (2 * half + byte) if padded == 4 else 0x7632 if half else 0x5410
    both = permute_bytes(*v, mine)
    fields = []
    for e in range(2):
        bits = both >> e
        fields.append([mix(x[e], bits * 4 & WORD, LOW_BITS), mix(x[e] >> 2, bits, LOW_BITS)])
    return fields


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_slots_of_values_are_subnormal_halves(dim: int) -> None:
    words, _, padded = geometry(dim)
    seen = set()
    codes, rows = packed_rows(dim, 2)
    for g in range(8):
        for tile in range(padded):
            block, p = divmod(tile, 4 if padded == 4 else 8)
            if p == 0:
                fields = value_fields(rows, dim, g, block)
            place = 2 * (p & 2)
            word = g & 3 if padded == 4 else 8 * block + g
            slot = 4 * (g >> 2) + p if padded == 4 else p
            for e in range(2):
                if p in (4, 5):
                    fields[e][p % 2] >>= 8
                operand = fields[e][p % 2] & 0x00070007 << place
                assert operand & 0xFC00FC00 == 0  # of exponent 0
                channel = (2 * slot + e) * words + word
                for token in range(2):
                    code = codes[token][channel] if word < words else 0
                    assert operand >> 16 * token & 0xFFFF == code << place
                if word < words:
                    seen.add(channel)
    assert seen == set(range(dim))
