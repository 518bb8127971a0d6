"""Operands of decode's products: q', weights and sums, laid out as the matrix unit takes them.

Rows of the matrix unit come in parts of 8. One group: a number is the sum of two fp16 ones, in two
parts. More groups: each has a part of its own, with one fp16 number.
"""

import triton
import triton.language as tl

from oscarkv.kernels.triton.portable import dot
from oscarkv.kernels.triton.unpack import channel_of


@triton.jit
def query_columns(
    q, rows_at, row_exists, high, low, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """q' [rows, COLUMNS] in fp32, in the order of unpacked keys, with bf16 products."""
    columns = FIRST + tl.arange(0, COLUMNS)
    steps = tl.arange(0, 16)
    total = tl.zeros((rows_at.shape[0], COLUMNS), tl.float32)
    for k in tl.range(0, DIM, 16, num_stages=2):
        part = tl.load(
            q + rows_at[:, None] + k + steps[None, :], mask=row_exists[:, None], other=0.0
        )
        at = (k + steps)[:, None] * STRIDE + columns[None, :]
        a, b = tl.load(high + at), tl.load(low + at)
        first = part.to(tl.bfloat16)
        total = dot(first, a, total)
        total = dot(first, b, total)
        if part.dtype != tl.bfloat16:
            rest = (part.to(tl.float32) - first.to(tl.float32)).to(tl.bfloat16)
            total = dot(rest, a, total)
    return fragment_order(total)


@triton.jit
def fragment_order(x):
    """[rows, n] -> the columns 0 1 8 9, 2 3 10 11, ... of each 16 side by side.

    A product leaves its result, here [rows, n], in one order of columns over the threads of a
    warp, and the next product takes it as an operand in another. If columns are renamed in this
    way, nothing moves. Hence the order of columns of the matrix for q', and that of tokens in which
    keys are read.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (ROWS, COLUMNS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (ROWS, COLUMNS))


@triton.jit
def query_parts(
    x, part, columns, GROUPS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """fp32 q' -> fp16: rounded or the rest, or the columns of one group; `part` says what."""
    high = x.to(tl.float16)
    if GROUPS == 1:
        low = (x - high.to(tl.float32)).to(tl.float16)
        parts = tl.where((part == 0)[:, None], high, low)
    else:
        group = channel_of(columns, BITS, WORDS, PADDED, True) // (DIM // GROUPS)
        parts = tl.where(part[:, None] == group[None, :], high, 0.0)
    return parts


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """[rows, n] -> [rows / 8, PARTS, 8, n]: one copy of 8 rows after the other."""
    EIGHTS: tl.constexpr = x.shape[0] // 8
    x = tl.reshape(x, (EIGHTS, 1, 8, x.shape[1]))
    return tl.broadcast_to(x, (EIGHTS, PARTS, 8, x.shape[3]))


@triton.jit
def high_low(x):
    """fp32 [rows, n] -> fp16 [2 rows, n]: 8 rows rounded, then what rounding lost, and so on."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    both = tl.reshape(tl.join(high, low), (x.shape[0] // 8, 8, x.shape[1], 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def join_parts(
    x, columns, PARTS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Sums of the parts' weights with all codes -> of each column with its own group's weights."""
    M: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (M // PARTS // 8, PARTS, 8, x.shape[1]))
    if GROUPS > 1:
        group = channel_of(columns, BITS, WORDS, PADDED, False) // (DIM // GROUPS)
        mine = group[None, None, None, :] == tl.arange(0, PARTS)[None, :, None, None]
        x = tl.where(mine, x, 0.0)
    return tl.reshape(tl.sum(x, 1), (M // PARTS, x.shape[3]))
