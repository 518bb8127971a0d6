"""Packed rows of the history -> fp16 tiles for the matrix unit, in registers.

A tile [tokens, columns] holds s c + lo. Its columns are not channels in order but lie as the bits
do, so that unpacking moves nothing (the query's matrix and the inverse value matrix are permuted
instead, once for a layer):

    2 and 4 bits:  column = slot p * H + half word h;  h = 2 w + e, H = 2 W rounded up to 2^n
                   channel = (2 p + e) W + w           (columns with h >= 2 W belong to no channel)
    3 bits:        column = channel                    (both planes are gathered)

Two codes cost three instructions: with `(word & mask) | 0x6400`, a half word is the fp16 number
1024 + c 2^shift; one fused multiply-add makes it c, exactly, the next s c + lo. With 8-bit
parameters it is s (c + lo / s), one more, because there only lo / s is a number of few bits; and
the scales are in units of 256 base, so that fp16 holds all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscarkv.codec.layout import RowLayout
from oscarkv.kernels.triton.portable import INTERPRETED
from oscarkv.kernels.triton.unpack import plane_words, row_words

#: What a tile of 8-bit parameters is divided by, beside the head's base: grid[n] / 2^8.
LOG_SHIFT = 8
_LOG_SHIFT = tl.constexpr(float(LOG_SHIFT))


def column_channels(row: RowLayout, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The channel of each column of a tile, and whether it has one."""
    column = torch.arange(columns, device=device)
    if row.bits == 3:
        channel, real = column, column < row.head_dim
    else:
        (plane,) = row.planes
        halves = columns // plane.slots
        slot, half = column // halves, column % halves
        channel = (2 * slot + half % 2) * plane.words + half // 2
        real = (half < 2 * plane.words) & (channel < row.head_dim)
    return torch.where(real, channel, 0), real


# -- parameters ----------------------------------------------------------------------------------


@triton.jit
def _stored(at, ok, MASKED: tl.constexpr):
    """What pointers to parameters point to."""
    if MASKED:
        stored = tl.load(at, mask=ok, other=0)
    else:
        stored = tl.load(at)
    return stored


@triton.jit
def _parameters(stored, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Stored parameters of groups -> s and lo, fp16; with 8 bits, s and lo / s.

    The 3-bit codes' lo / s is 7 z / 96: there, s / 96 and 7 z.
    """
    if FORMAT == "fp16":  # int32: s in the low half
        s = (stored & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        lo = (stored >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        s = tl.exp2((stored & 0xFF).to(tl.float32) * 0.0625 - _LOG_SHIFT)
        if FORMAT == "log8":  # int16: z in the high byte, with its sign
            lo = (stored >> 8).to(tl.float32)
            if BITS == 3:
                lo *= 7.0
            else:
                lo *= ((1 << BITS) - 1) / 96
        else:
            lo = tl.zeros_like(s) - ((1 << BITS) - 1) / 2
            if BITS == 3:
                lo *= 96.0
        if BITS == 3:
            s *= 1 / 96
        s, lo = s.to(tl.float16), lo.to(tl.float16)
    return s, lo


# -- one plane of 2 or 4 bits --------------------------------------------------------------------

# Two codes at a time, in the halves of a register: half words, mask, unit, offset, s, lo -> tile.
_FP16_TILE = tl.constexpr("""{
    .reg .b32 x;
    lop3.b32 x, $1, $2, 0x64006400, 0xEA;
    fma.rn.f16x2 x, x, $3, $4;
    fma.rn.f16x2 $0, x, $5, $6;
}""")
# lo / s is the same for all tokens, and in `offset`.
_SYMMETRIC_TILE = tl.constexpr("""{
    .reg .b32 x;
    lop3.b32 x, $1, $2, 0x64006400, 0xEA;
    fma.rn.f16x2 x, x, $3, $4;
    mul.rn.f16x2 $0, x, $5;
}""")
_LOG8_TILE = tl.constexpr("""{
    .reg .b32 x;
    lop3.b32 x, $1, $2, 0x64006400, 0xEA;
    fma.rn.f16x2 x, x, $3, $4;
    add.rn.f16x2 x, x, $6;
    mul.rn.f16x2 $0, x, $5;
}""")


@triton.jit
def _slot(
    halves, shifted, s, lo, at, ok, P: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Slot P of every half word: [tokens, half words]."""
    SHIFT: tl.constexpr = (P * BITS) % 8
    if P * BITS >= 8:
        halves = shifted
    if GROUPS > 1:
        SIZE: tl.constexpr = HEAD_DIM // GROUPS
        if SIZE % (2 * WORDS) == 0:  # all of this slot lies in one group
            s, lo = _parameters(_stored(at + 2 * P * WORDS // SIZE, ok, MASKED), FORMAT, BITS)
            s, lo = s[:, None], lo[:, None]
        else:
            half = tl.arange(0, halves.shape[1])
            group = ((2 * P + half % 2) * WORDS + half // 2) // SIZE
            group = tl.minimum(group, GROUPS - 1)[None, :]
            stored = _stored(at[:, None] + group, ok[:, None], MASKED)
            s, lo = _parameters(stored, FORMAT, BITS)
    MASK: tl.constexpr = ((1 << BITS) - 1) << SHIFT
    UNIT: tl.constexpr = 1.0 / (1 << SHIFT)
    mask = tl.full([1, 1], MASK, tl.int16)
    unit = tl.full([1, 1], UNIT, tl.float16)
    offset = tl.full([1, 1], -1024.0 * UNIT, tl.float16)
    if ASM and FORMAT == "log8-symmetric" and SHIFT > 0:  # else fp16 does not hold 1024 + lo / s
        offset = tl.full([1, 1], -1024.0 * UNIT - ((1 << BITS) - 1) / 2, tl.float16)
        tile = tl.inline_asm_elementwise(
            _SYMMETRIC_TILE,
            "=r,r,r,r,r,r",
            [halves, mask, unit, offset, s],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif ASM:
        tile = tl.inline_asm_elementwise(
            _FP16_TILE if FORMAT == "fp16" else _LOG8_TILE,
            "=r,r,r,r,r,r,r",
            [halves, mask, unit, offset, s, lo],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        field = (halves & mask) | tl.full([1, 1], 0x6400, tl.int16)
        tile = _value(field.to(tl.float16, bitcast=True) * unit + offset, s, lo, FORMAT)
    return tile


@triton.jit
def _value(codes, s, lo, FORMAT: tl.constexpr):
    if FORMAT != "fp16":
        value = (codes + lo) * s
    elif INTERPRETED:  # it would round twice in what is one operation
        value = (codes.to(tl.float32) * s.to(tl.float32) + lo.to(tl.float32)).to(tl.float16)
    else:
        value = tl.fma(codes, tl.broadcast_to(s, codes.shape), tl.broadcast_to(lo, codes.shape))
    return value


@triton.jit
def _beside(left, right):
    """[n, a] and [n, a] -> [n, 2 a]: registers are renamed, nothing moves."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _slots(
    halves, shifted, s, lo, at, ok, P: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """COUNT slots, a power of two of them, from P on, side by side."""
    if COUNT == 1:
        tile = _slot(
            halves, shifted, s, lo, at, ok, P, BITS, WORDS, HEAD_DIM, GROUPS, FORMAT, MASKED, ASM
        )
    else:
        left = _slots(
            halves, shifted, s, lo, at, ok, P, COUNT // 2, BITS, WORDS, HEAD_DIM, GROUPS, FORMAT,
            MASKED, ASM,
        )  # fmt: skip
        right = _slots(
            halves, shifted, s, lo, at, ok, P + COUNT // 2, COUNT // 2, BITS, WORDS, HEAD_DIM,
            GROUPS, FORMAT, MASKED, ASM,
        )  # fmt: skip
        tile = _beside(left, right)
    return tile


# -- three bits ----------------------------------------------------------------------------------


@triton.jit
def _field(words, ok, channel, BITS: tl.constexpr, WORDS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One plane's bits of each channel, gathered: int32 [tokens, channels]."""
    field = channel // WORDS  # 2 p + e
    wanted = ok[:, None] & (channel < HEAD_DIM)[None, :]
    word = tl.load(words + (channel % WORDS)[None, :], mask=wanted, other=0)
    shift = 16 * (field % 2) + BITS * (field // 2)
    return (word >> shift[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _gathered(
    rows, s, lo, at, ok, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, COLUMNS)
    LOW: tl.constexpr = plane_words(HEAD_DIM, 2)
    HIGH: tl.constexpr = plane_words(HEAD_DIM, 1)
    # Whole words: gathered half words of 32 tokens held wrong numbers (H200, Triton 3.6).
    words = rows.to(tl.pointer_type(tl.int32))
    low = _field(words, ok, channel, 2, LOW, HEAD_DIM)
    high = _field(words + LOW, ok, channel, 1, HIGH, HEAD_DIM)
    if GROUPS > 1:
        group = tl.minimum(channel // (HEAD_DIM // GROUPS), GROUPS - 1)
        stored = _stored(at[:, None] + group[None, :], ok[:, None], True)
        s, lo = _parameters(stored, FORMAT, 3)
    codes = (low + 4 * high).to(tl.float16)
    if FORMAT != "fp16":
        codes *= 96.0
    return _value(codes, s, lo, FORMAT)


# -- a block of tokens ---------------------------------------------------------------------------


@triton.jit
def _side(
    codes, parameters, page, offset, ok, page_stride, parameter_stride, ALIGN: tl.constexpr,
    PARAMETER_ALIGN: tl.constexpr, START: tl.constexpr, PARAMETER_START: tl.constexpr,
    BITS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys or values of tokens at (page, offset) of one head -> s c + lo, fp16 [tokens, COLUMNS].

    `codes` and `parameters` are the head's pages as int16 and as a group's parameters (int32,
    int16 or uint8), START and PARAMETER_START where the side begins, in these units. Symmetric
    parameters as int16: of two groups, each half the slots.
    """
    PAIRED: tl.constexpr = FORMAT == "log8-symmetric" and parameters.dtype.element_ty == tl.int16
    STORED: tl.constexpr = 1 if PAIRED else GROUPS  # numbers of a token
    page_stride = tl.multiple_of(page_stride, ALIGN)
    parameter_stride = tl.multiple_of(parameter_stride, PARAMETER_ALIGN)
    at = parameters + page.to(tl.int64) * parameter_stride + (offset * STORED + PARAMETER_START)
    if GROUPS == 1:
        s, lo = _parameters(_stored(at, ok, MASKED), FORMAT, BITS)
        s, lo = s[:, None], lo[:, None]
    else:  # two together, or each slot loads its own
        s, lo = ok, ok
    rows = codes + page.to(tl.int64) * page_stride + START
    if BITS == 3:
        HALVES: tl.constexpr = 2 * row_words(HEAD_DIM, BITS)
        rows = (rows + offset * HALVES)[:, None]
        tile = _gathered(rows, s, lo, at, ok, COLUMNS, HEAD_DIM, GROUPS, FORMAT)
    else:
        WORDS: tl.constexpr = plane_words(HEAD_DIM, BITS)
        WIDTH: tl.constexpr = COLUMNS * BITS // 16  # half words of a row, with padding
        half = tl.arange(0, WIDTH)[None, :]
        rows = (rows + offset * (2 * WORDS))[:, None] + half
        if MASKED:
            halves = tl.load(rows, mask=ok[:, None] & (half < 2 * WORDS), other=0)
        elif WIDTH == 2 * WORDS:
            halves = tl.load(rows)
        else:
            halves = tl.load(rows, mask=half < 2 * WORDS, other=0)
        if ASM:
            shifted = tl.inline_asm_elementwise(
                "shr.u32 $0, $1, 8;", "=r,r", [halves], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            shifted = halves >> 8
        SLOTS: tl.constexpr = 16 // BITS
        if PAIRED:
            stored = _stored(at, ok, MASKED)
            s, lo = _parameters(stored, FORMAT, BITS)
            left = _slots(
                halves, shifted, s[:, None], lo[:, None], at, ok, 0, SLOTS // 2, BITS, WORDS,
                HEAD_DIM, 1, FORMAT, MASKED, ASM,
            )  # fmt: skip
            s, lo = _parameters(stored >> 8, FORMAT, BITS)
            right = _slots(
                halves, shifted, s[:, None], lo[:, None], at, ok, SLOTS // 2, SLOTS // 2, BITS,
                WORDS, HEAD_DIM, 1, FORMAT, MASKED, ASM,
            )  # fmt: skip
            tile = _beside(left, right)
        else:
            tile = _slots(
                halves, shifted, s, lo, at, ok, 0, SLOTS, BITS, WORDS, HEAD_DIM, GROUPS, FORMAT,
                MASKED, ASM,
            )  # fmt: skip
    return tile


@triton.jit
def history_sides(
    codes, parameters, table, j, ok, codes_page, parameters_page, table_column, ALIGN: tl.constexpr,
    PARAMETER_ALIGN: tl.constexpr, PAGE: tl.constexpr, VALUE_START: tl.constexpr,
    KEY_PARAMETERS: tl.constexpr, VALUE_PARAMETERS: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head at positions j, still transformed: fp16 [n, COLUMNS] each."""
    if MASKED:
        page = tl.load(table + j // PAGE * table_column, mask=ok, other=0)
    else:
        page = tl.load(table + j // PAGE * table_column)
    keys = _side(
        codes, parameters, page, j % PAGE, ok, codes_page, parameters_page, ALIGN, PARAMETER_ALIGN,
        0, KEY_PARAMETERS, KEY_BITS, COLUMNS, HEAD_DIM, GROUPS, FORMAT, MASKED, ASM,
    )  # fmt: skip
    values = _side(
        codes, parameters, page, j % PAGE, ok, codes_page, parameters_page, ALIGN, PARAMETER_ALIGN,
        VALUE_START, VALUE_PARAMETERS, VALUE_BITS, COLUMNS, HEAD_DIM, GROUPS, FORMAT, MASKED, ASM,
    )  # fmt: skip
    return keys, values
