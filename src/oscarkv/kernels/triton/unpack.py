"""Packed words -> fp16 codes a matrix unit can multiply, two codes with one logic operation.

A word holds the slots of two 16-bit halves. Masked, it is a pair of fp16 numbers whose bits are
those of the two codes: the SUBNORMAL numbers c 2^(b j) 2^-24, exact, for the slots j whose bits lie
below the exponent. Nothing is converted or scaled: 2^-(b j) is folded into the other operand
(`constants.py`) and 2^24 into the result.

The orders of the columns are chosen so that the compiler needs no exchange between threads after
unpacking (it moves the packed words to the threads of the matrix fragment instead):

    keys    (slot, word, half)     a thread's fragment is pairs of neighbouring channels
    values  (slot, half, word)     a fragment's columns are spread over 8 threads: the words
"""

import triton
import triton.language as tl


@triton.constexpr_function
def low_bits(bits: int) -> int:
    """Bits of a row's first plane: 3-bit codes are a plane of 2 and one of 1."""
    return 2 if bits == 3 else bits


@triton.constexpr_function
def plane_words(dim: int, bits: int) -> int:
    """Words of a plane of `bits` bits a channel."""
    return (dim * bits + 31) // 32


@triton.constexpr_function
def row_words(dim: int, bits: int) -> int:
    """Words of a row, all its planes."""
    return plane_words(dim, low_bits(bits)) + (plane_words(dim, 1) if bits == 3 else 0)


@triton.jit
def _pair(words, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The two codes of one slot, as [..., 2] subnormal numbers."""
    fields = (words >> SHIFT) & MASK
    low = (fields & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (fields >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _two_slots(words, SHIFT: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr):
    return tl.join(_pair(words, SHIFT, MASK), _pair(words, SHIFT, MASK << BITS))


@triton.jit
def unpack(words, BITS: tl.constexpr, KEYS: tl.constexpr):
    """One bit plane: int32 words [n, W] -> fp16 [n, 32 W / BITS], in the orders named above."""
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1] * 32 // BITS
    if BITS == 2:
        low = tl.join(_two_slots(words, 0, 0x00030003, 2), _two_slots(words, 0, 0x00300030, 2))
        high = tl.join(_two_slots(words, 8, 0x00030003, 2), _two_slots(words, 8, 0x00300030, 2))
        tile = tl.join(low, high)  # [n, word, half, slot bit 0, slot bit 1, slot bit 2]
        if KEYS:
            tile = tl.permute(tile, (0, 5, 4, 3, 1, 2))
        else:
            tile = tl.permute(tile, (0, 5, 4, 3, 2, 1))
    elif BITS == 4:
        low, high = _two_slots(words, 0, 0x000F000F, 4), _two_slots(words, 8, 0x000F000F, 4)
        tile = tl.join(low, high)
        if KEYS:
            tile = tl.permute(tile, (0, 4, 3, 1, 2))
        else:
            tile = tl.permute(tile, (0, 4, 3, 2, 1))
    else:
        a = tl.join(_two_slots(words, 0, 0x00010001, 1), _two_slots(words, 0, 0x00040004, 1))
        b = tl.join(_two_slots(words, 0, 0x00100010, 1), _two_slots(words, 0, 0x00400040, 1))
        c = tl.join(_two_slots(words, 8, 0x00010001, 1), _two_slots(words, 8, 0x00040004, 1))
        d = tl.join(_two_slots(words, 8, 0x00100010, 1), _two_slots(words, 8, 0x00400040, 1))
        tile = tl.join(tl.join(a, b), tl.join(c, d))
        if KEYS:
            tile = tl.permute(tile, (0, 6, 5, 4, 3, 1, 2))
        else:
            tile = tl.permute(tile, (0, 6, 5, 4, 3, 2, 1))
    return tl.reshape(tile, (ROWS, COLUMNS))


@triton.jit
def channel_of(
    columns, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr
):
    """Channel of each column of `unpack`; meaningless for words that are padding."""
    slot = columns // (2 * PADDED)
    if KEYS:
        word = columns // 2 % PADDED
        half = columns % 2
    else:
        word = columns % PADDED
        half = columns // PADDED % 2
    return (2 * slot + half) * WORDS + word


@triton.jit
def slot_weight(columns, BITS: tl.constexpr, PADDED: tl.constexpr):
    """2^(b j), by which `unpack` multiplies each column's codes."""
    slot = columns // (2 * PADDED)
    return (1 << (slot % (8 // BITS) * BITS)).to(tl.float32)
