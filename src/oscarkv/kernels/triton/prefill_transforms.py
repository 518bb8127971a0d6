"""Prefill's products with a layer's matrices: q A^-T before the history, acc B^-1 after it."""

import triton
import triton.language as tl

from oscarkv.kernels.triton.portable import dot


@triton.jit
def transformed_queries(
    rows, ok, matrix, rest, mean, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q' = q A^-T as fp16, each row divided by a power of two; that power; and q . m_K.

    `matrix` and `rest` are A^-1 in two bf16 parts. EXACT: q is bf16 and needs no second part.
    The product is taken as A^-1 q^T: the compiler then keeps q' in shared memory for the loops to
    come, not in registers, which they need.
    """
    column = tl.arange(0, COLUMNS)
    result = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
    middle = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(0, COLUMNS, BLOCK, num_stages=1):
        channel = first + tl.arange(0, BLOCK)
        wanted = ok[:, None] & (channel < HEAD_DIM)[None, :]
        part = tl.load(rows[:, None] + channel[None, :], mask=wanted, other=0.0)
        at = column[:, None] * COLUMNS + channel[None, :]
        high = tl.load(matrix + at)
        rounded = part.to(tl.bfloat16)
        result = dot(high, tl.trans(rounded), result)
        result = dot(tl.load(rest + at), tl.trans(rounded), result)
        exact = part.to(tl.float32)
        if not EXACT:
            left = (exact - rounded.to(tl.float32)).to(tl.bfloat16)
            result = dot(high, tl.trans(left), result)
        means = tl.load(mean + channel, mask=channel < HEAD_DIM, other=0.0).to(tl.float32)
        middle += tl.sum(exact * means[None, :], 1)
    # The largest of a row becomes 8 .. 16, by the exponent's bits.
    exponent = tl.max(tl.abs(result), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 30), 224)
    unit = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.trans((result * inverse[None, :]).to(tl.float16)), unit, middle


@triton.jit
def _product(
    acc, matrix, rest, result, COLUMNS: tl.constexpr, SLICE: tl.constexpr, FOLDED: tl.constexpr
):
    """result + acc B^-1, by at most SLICE rows of the matrix at a time."""
    ROWS: tl.constexpr = acc.shape[1]
    if ROWS <= SLICE:
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        at = row[:, None] * COLUMNS + column[None, :]
        high = tl.load(matrix + at)
        rounded = acc.to(tl.bfloat16)
        left = (acc - rounded.to(tl.float32)).to(tl.bfloat16)
        result = dot(rounded, high, result)
        result = dot(left, high, result)
        if not FOLDED:
            result = dot(rounded, tl.load(rest + at), result)
    else:
        HALF: tl.constexpr = ROWS // 2
        halves = tl.permute(tl.reshape(acc, (acc.shape[0], 2, HALF)), (0, 2, 1))
        first, second = tl.split(halves)
        result = _product(first, matrix, rest, result, COLUMNS, SLICE, FOLDED)
        below: tl.constexpr = HALF * COLUMNS
        result = _product(second, matrix + below, rest + below, result, COLUMNS, SLICE, FOLDED)
    return result


@triton.jit
def back_transformed(
    acc, total, matrix, rest, mean, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SLICE: tl.constexpr, FOLDED: tl.constexpr, VALUE_MEAN: tl.constexpr,
):  # fmt: skip
    """acc B^-1 + total m_V. FOLDED: the matrix only puts the channels in order.

    SLICE rows of the matrix lie in shared memory at a time: all of them, where they fit.
    """
    result = _product(acc, matrix, rest, None, COLUMNS, SLICE, FOLDED)
    if VALUE_MEAN:
        column = tl.arange(0, COLUMNS)
        means = tl.load(mean + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        result += total[:, None] * means[None, :]
    return result
