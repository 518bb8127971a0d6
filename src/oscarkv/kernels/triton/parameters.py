"""Scales and offsets of groups, stored and read back: section 3 of docs/format.md.

Storing is exact, operation by operation. Reading may take an approximate power of two: a reader
only has to be close.
"""

import triton
import triton.language as tl

FP16 = tl.constexpr(0)
LOG8 = tl.constexpr(1)
SYMMETRIC = tl.constexpr(2)

FORMATS = {"fp16": 0, "log8": 1, "log8-symmetric": 2}
BYTES = (4, 2, 1)


@triton.jit
def _load(pointers, exists, MASKED: tl.constexpr):
    if MASKED:
        stored = tl.load(pointers, mask=exists, other=0)
    else:
        stored = tl.load(pointers)
    return stored


@triton.jit
def load_grid(
    history, offsets, exists, exponent, FORMAT: tl.constexpr, LEVELS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """s and lo of groups whose parameters lie `offsets` bytes into `history`; 0 where masked."""
    if FORMAT == FP16:
        both = _load(history.to(tl.pointer_type(tl.int32)) + offsets // 4, exists, MASKED)
        s = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        lo = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == LOG8:
        both = _load(history.to(tl.pointer_type(tl.int16)) + offsets // 2, exists, MASKED)
        both = both.to(tl.int32)
        s = tl.exp2((both & 0xFF).to(tl.float32) * 0.0625 + exponent)
        if MASKED:
            s = tl.where(exists, s, 0.0)
        lo = s * ((both >> 8).to(tl.float32) * ((LEVELS - 1) / 96))
    else:
        n = _load(history + offsets, exists, MASKED)
        s = tl.exp2(n.to(tl.float32) * 0.0625 + exponent)
        if MASKED:
            s = tl.where(exists, s, 0.0)
        lo = s * (-(LEVELS - 1) / 2)
    return s, lo


@triton.jit
def store_grid(
    s, lo, base, grid, pointers, keep, FORMAT: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Store s, lo at byte pointers where `keep`; returns them as a reader will see them.

    Each line is one fp32 operation. `grid` holds the 256 scales of an octave grid at base 1.
    """
    if FORMAT == FP16:
        half_s = tl.minimum(tl.maximum(s, 0.00006103515625), 65504.0).to(tl.float16)
        half_lo = tl.minimum(tl.maximum(lo, -65504.0), 65504.0).to(tl.float16)
        halves = pointers.to(tl.pointer_type(tl.float16))
        tl.store(halves, half_s, mask=keep)
        tl.store(halves + 1, half_lo, mask=keep)
        s, lo = half_s.to(tl.float32), half_lo.to(tl.float32)
    else:
        if FORMAT == LOG8:  # an offset beyond 127 steps needs a larger scale to be held
            s = tl.maximum(
                s, tl.div_rn(tl.abs(lo), tl.full(lo.shape, 127 * (LEVELS - 1) / 96, tl.float32))
            )
        n = _grid_index(tl.div_rn(s, base))
        s = tl.load(grid + n) * base
        tl.store(pointers, n.to(tl.uint8), mask=keep)
        if FORMAT == LOG8:
            step = tl.full(lo.shape, (LEVELS - 1) / 96, tl.float32)
            z = tl.div_rn(tl.div_rn(lo, s), step)
            z = round_to_even(tl.minimum(tl.maximum(z, -128.0), 128.0))
            z = tl.minimum(tl.maximum(z, -127.0), 127.0)
            tl.store(pointers + 1, (z.to(tl.int32) & 0xFF).to(tl.uint8), mask=keep)
            lo = s * (z * step)
        else:
            lo = s * (-(LEVELS - 1) / 2)
    return s, lo


@triton.jit
def round_to_even(x):
    """The nearest integer, ties to even, of |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _grid_index(x):
    """The number of bounds half[n mod 16] 2^(n div 16), n = 0 .. 254, not above x >= 0."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = bits & 0x7FFFFF
    n = ((bits >> 23) - 127) * 16
    n += (mantissa >= 0x02CD87).to(tl.int32) + (mantissa >= 0x08980F).to(tl.int32)
    n += (mantissa >= 0x0EA43A).to(tl.int32) + (mantissa >= 0x14F4F0).to(tl.int32)
    n += (mantissa >= 0x1B8D3A).to(tl.int32) + (mantissa >= 0x227043).to(tl.int32)
    n += (mantissa >= 0x29A15B).to(tl.int32) + (mantissa >= 0x3123F6).to(tl.int32)
    n += (mantissa >= 0x38FBAF).to(tl.int32) + (mantissa >= 0x412C4D).to(tl.int32)
    n += (mantissa >= 0x49B9BE).to(tl.int32) + (mantissa >= 0x52A81E).to(tl.int32)
    n += (mantissa >= 0x5BFBB8).to(tl.int32) + (mantissa >= 0x65B907).to(tl.int32)
    n += (mantissa >= 0x6FE4BA).to(tl.int32) + (mantissa >= 0x7A83B3).to(tl.int32)
    return tl.minimum(tl.maximum(n, 0), 255)
