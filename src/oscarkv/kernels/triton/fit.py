"""The exact fit: sections 4 and 5 of docs/format.md, on tiles of rows.

A tile is fp32 [rows, n], one row for each group, n padded to a power of two; the padding is masked
out of every sum. All sums are of integers, so their order does not matter, and every other
operation is a single IEEE fp32 operation: kernels that use this file must be launched with
`enable_fp_fusion=False`.
"""

import triton
import triton.language as tl

from oscarkv.codec import encode
from oscarkv.kernels.triton.parameters import SYMMETRIC, round_to_even, store_grid

REFINED_SCALE_2 = tl.constexpr(encode.REFINED_SCALE[2])
REFINED_SCALE_3 = tl.constexpr(encode.REFINED_SCALE[3])
SPLIT_SCALE_2 = tl.constexpr(encode.SPLIT_SCALE[2])
SPLIT_SCALE_3 = tl.constexpr(encode.SPLIT_SCALE[3])
#: From a code's bits in a packed word to those of its second digit: three quarters of a row on,
#: or, with split scales, one.
SECOND_DIGIT = tl.constexpr(12)
SPLIT_SECOND_DIGIT = tl.constexpr(4)


@triton.jit
def _divided(x, NUMBER: tl.constexpr):
    return tl.div_rn(x, tl.full(x.shape, NUMBER, tl.float32))


@triton.jit
def count_thresholds(x, s, lo, LEVELS: tl.constexpr, SYM: tl.constexpr):
    """How many of the L - 1 thresholds of each row's grid its numbers reach, int32 like x."""
    codes = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(1, LEVELS):
        if SYM:
            threshold = s * (k - LEVELS / 2)
        else:
            threshold = s * (k - 0.5) + lo
        codes += (threshold[:, None] <= x).to(tl.int32)
    return codes


@triton.jit
def _improve(X, whole, exists, S, LO, sum_x, N: tl.constexpr, LEVELS: tl.constexpr,
             SYM: tl.constexpr):  # fmt: skip
    """One round: the best S and LO for the codes of the given ones, and their cov and den."""
    TOP: tl.constexpr = LEVELS - 1
    codes = count_thresholds(X, S, LO, LEVELS, SYM)
    if X.shape[1] != N:
        codes = tl.where(exists[None, :], codes, 0)
    # sum(c) < 2^12 and sum(c^2) < 2^16: one sum for both
    sums = tl.sum(codes + ((codes * codes) << 12), 1)
    sum_c, sum_cc = sums & 0xFFF, sums >> 12
    sum_cx = tl.sum(codes * whole, 1).to(tl.int64)
    if SYM:
        cov = (N * (2 * sum_cx - TOP * sum_x.to(tl.int64))).to(tl.float32)
        den = (N * (4 * sum_cc - 4 * TOP * sum_c + N * TOP * TOP)).to(tl.float32)
        S = tl.div_rn(2.0 * cov, den)
    else:
        cov = (N * sum_cx - sum_c.to(tl.int64) * sum_x.to(tl.int64)).to(tl.float32)
        den = (N * sum_cc - sum_c * sum_c).to(tl.float32)
        S = tl.div_rn(cov, tl.maximum(den, 1.0))
        LO = _divided(sum_x.to(tl.float32) - S * sum_c.to(tl.float32), N)
    return S, LO, cov, den


@triton.jit
def _quarter_power(x, QUARTERS: tl.constexpr):
    """x^(QUARTERS / 4), by square roots and products only."""
    if QUARTERS == 0:
        x = tl.full(x.shape, 1.0, tl.float32)
    elif QUARTERS < 4:
        root = tl.sqrt_rn(x)
        if QUARTERS == 2:
            x = root
        elif QUARTERS == 1:
            x = tl.sqrt_rn(root)
        else:
            x = root * tl.sqrt_rn(root)
    return x


@triton.jit
def fit_least_squares(
    x, exists, base, grid, pointers, keep, N: tl.constexpr, BITS: tl.constexpr,
    FORMAT: tl.constexpr, QUARTERS: tl.constexpr, START_A: tl.constexpr, START_B: tl.constexpr,
    START_C: tl.constexpr, REFINED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store each row's parameters; returns its codes, int32 like x.

    Refined, the N columns that exist are three quarters of the row. Codes of the first N / 3
    columns then have their second digits at bit SECOND_DIGIT; those of columns from N on are 0.
    Split, every other row, from the first on, has two digits of its first N / 2 columns on a grid
    of their own, second ones at bit SPLIT_SECOND_DIGIT, and zeros beside them.
    """
    LEVELS: tl.constexpr = 2**BITS
    SYM: tl.constexpr = FORMAT == SYMMETRIC
    # 1. Integers.
    if x.shape[1] == N:
        lowest, highest = tl.min(x, 1), tl.max(x, 1)
    else:
        lowest = tl.min(tl.where(exists[None, :], x, float("inf")), 1)
        highest = tl.max(tl.where(exists[None, :], x, float("-inf")), 1)
    if SYM:
        middle = tl.zeros_like(lowest)
        half = tl.maximum(highest, -lowest)
    else:
        middle = 0.5 * lowest + 0.5 * highest
        half = tl.maximum(highest - middle, middle - lowest)
    half = tl.maximum(half, 7.888609052210118e-31)  # 2^-100
    exponent = (half.to(tl.int32, bitcast=True) & 0x7F800000) - (10 << 23)
    unit = exponent.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # a power of two: exact
    X = round_to_even((x - middle[:, None]) * inverse[:, None])
    if x.shape[1] != N:
        X = tl.where(exists[None, :], X, 0.0)
    whole = X.to(tl.int32)
    # 2. Moments.
    sum_x = tl.sum(whole, 1)
    spread = N * tl.sum(whole * whole, 1).to(tl.int64)
    center = tl.zeros_like(lowest)
    if not SYM:
        wide = sum_x.to(tl.int64)
        spread -= wide * wide
        center = _divided(sum_x.to(tl.float32), N)
    spread = spread.to(tl.float32)
    dev = _divided(tl.sqrt_rn(spread), N)
    # 3. to 5. One round from each start, three more from the best.
    S = dev * START_A
    S, LO, cov, den = _improve(
        X, whole, exists, S, center - S * ((LEVELS - 1) / 2), sum_x, N, LEVELS, SYM
    )
    best = tl.div_rn(cov * cov, tl.maximum(den, 1.0))
    for start in tl.static_range(1, 3):
        other = dev * (START_B if start == 1 else START_C)
        other, other_lo, cov, den = _improve(
            X, whole, exists, other, center - other * ((LEVELS - 1) / 2), sum_x, N, LEVELS, SYM
        )
        explained = tl.div_rn(cov * cov, tl.maximum(den, 1.0))
        better = explained > best
        best = tl.where(better, explained, best)
        S, LO = tl.where(better, other, S), tl.where(better, other_lo, LO)
    for _ in tl.range(0, 3):
        S, LO, cov, den = _improve(X, whole, exists, S, LO, sum_x, N, LEVELS, SYM)
    # 6. Gain.
    smallest: tl.constexpr = 1.1754943508222875e-38  # 2^-126
    ratio = tl.div_rn(spread * den, tl.maximum(cov * cov, smallest))
    gain = _quarter_power(tl.minimum(tl.maximum(ratio, 0.8), 1.5), QUARTERS)
    # 7. Parameters.
    s = (S * gain) * unit
    if SPLIT:
        twice = tl.arange(0, x.shape[0]) % 2 == 0
        digits = tl.arange(0, x.shape[1])[None, :] < N // 2
        largest = tl.max(tl.where(digits, tl.abs(x), 0.0), 1)
        s = tl.where(twice, largest * (SPLIT_SCALE_2 if BITS == 2 else SPLIT_SCALE_3), s)
        gain = tl.where(twice, 1.0, gain)
    if SYM:
        lo = s * (-(LEVELS - 1) / 2)
    else:
        lo = ((LO - center) * gain + center) * unit + middle
    mu = center * unit + middle
    s, lo = store_grid(s, lo, base, grid, pointers, keep, FORMAT, LEVELS)
    # 8. Codes.
    codes = count_thresholds(x, tl.div_rn(s, gain), tl.div_rn(lo - mu, gain) + mu, LEVELS, SYM)
    if REFINED:
        column = tl.arange(0, x.shape[1])[None, :]
        scaled = x * (REFINED_SCALE_2 if BITS == 2 else REFINED_SCALE_3)
        both = _two_digits(scaled, s, lo, LEVELS, SYM, SECOND_DIGIT)
        codes = tl.where(column < N // 3, both, tl.where(exists[None, :], codes, 0))
    if SPLIT:
        both = _two_digits(x, s, lo, LEVELS, SYM, SPLIT_SECOND_DIGIT)
        codes = tl.where(twice[:, None], tl.where(digits, both, 0), codes)
    return codes


@triton.jit
def _two_digits(x, s, lo, LEVELS: tl.constexpr, SYM: tl.constexpr, SECOND: tl.constexpr):
    """Codes on the grid of a reader; at bit SECOND, those of L times what they leave."""
    first = count_thresholds(x, s, lo, LEVELS, SYM)
    rest = (x - (s[:, None] * first.to(tl.float32) + lo[:, None])) * LEVELS
    return first + (count_thresholds(rest, s, lo, LEVELS, SYM) << SECOND)


@triton.jit
def clip_threshold(x, exists, INDEX: tl.constexpr):
    """The element of index INDEX of |x| sorted ascending, for each row: [rows].

    Bit by bit from the top: the largest number with at most INDEX elements below it.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    bits = tl.where(exists[None, :], bits, 0x7FFFFFFF)
    found = tl.zeros((x.shape[0],), tl.int32)
    for i in tl.range(0, 31):
        candidate = found | (1 << (30 - i))
        below = tl.sum((bits < candidate[:, None]).to(tl.int32), 1)
        found = tl.where(below <= INDEX, candidate, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def fit_minmax(
    x, clipped, exists, base, grid, pointers, keep, N: tl.constexpr, BITS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Store each row's parameters, from the range of `clipped`; returns the codes of x."""
    LEVELS: tl.constexpr = 2**BITS
    if x.shape[1] == N:
        lo, highest = tl.min(clipped, 1), tl.max(clipped, 1)
    else:
        lo = tl.min(tl.where(exists[None, :], clipped, float("inf")), 1)
        highest = tl.max(tl.where(exists[None, :], clipped, float("-inf")), 1)
    s = _divided(tl.maximum(highest - lo, 1e-8), LEVELS - 1)
    s, lo = store_grid(s, lo, base, grid, pointers, keep, FORMAT, LEVELS)
    return count_thresholds(x, s, lo, LEVELS, FORMAT == SYMMETRIC)
