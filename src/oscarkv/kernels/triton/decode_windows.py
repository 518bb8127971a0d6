"""Decode's split 0: attention over the exact windows."""

import triton
import triton.language as tl

from oscarkv.kernels.triton.portable import bound, dot
from oscarkv.kernels.triton.powers import EMPTY, LOG2E, capped


@triton.jit
def attend_windows(
    q, rows_at, row_exists, positions, first, length, acc_at, maxima_at, sums_at, window, table,
    table_step, scale, soft_cap, DIM: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    SLIDING: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SIDE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sink and the recent tokens, as the model produced them."""
    ROWS: tl.constexpr = rows_at.shape[0]
    WIDTH: tl.constexpr = triton.next_power_of_2(DIM)
    channels = tl.arange(0, WIDTH)
    in_row = channels < DIM
    query = tl.load(
        q + rows_at[:, None] + channels[None, :],
        mask=row_exists[:, None] & in_row[None, :],
        other=0.0,
    )
    HALVES: tl.constexpr = query.dtype == window.dtype.element_ty and query.dtype != tl.float32
    if not HALVES:
        query = query.to(tl.float32)
    factor = scale if SOFT_CAP else scale * LOG2E
    sink_end = tl.minimum(SINK, length)
    oldest = tl.maximum(first - RECENT + 1, SINK)
    if SLIDING > 0:
        oldest = tl.maximum(oldest, first - SLIDING + 1)
        sink_end = tl.where(first - SLIDING + 1 < SINK, sink_end, 0)
    oldest = oldest // 16 * 16
    sink_blocks = tl.cdiv(sink_end, BLOCK)
    blocks = sink_blocks + tl.cdiv(tl.maximum(length - oldest, 0), BLOCK)
    top = tl.full((ROWS,), EMPTY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for block in tl.range(0, bound(blocks), num_stages=1):
        is_sink = block < sink_blocks
        j = tl.where(is_sink, block * BLOCK, oldest + (block - sink_blocks) * BLOCK)
        j += tl.arange(0, BLOCK)
        exists = tl.where(is_sink, j < sink_end, (j >= SINK) & (j < length))
        if SLIDING > 0:
            exists &= j > first - SLIDING
        page = tl.load(table + (j // 16).to(tl.int64) * table_step, mask=exists, other=0)
        exists &= page > 0
        at = page.to(tl.int64) * PAGE_STRIDE + j % 16 * TOKEN_STRIDE
        present = exists[:, None] & in_row[None, :]
        keys = tl.load(window + at[:, None] + channels[None, :], mask=present, other=0.0)
        values = tl.load(
            window + SIDE_STRIDE + at[:, None] + channels[None, :], mask=present, other=0.0
        )
        logits = tl.zeros((ROWS, BLOCK), tl.float32)
        logits = dot(query, tl.trans(keys.to(query.dtype)), logits) * factor
        logits = capped(logits, soft_cap, SOFT_CAP)
        t = positions[:, None]
        visible = exists[None, :] & (j[None, :] <= t)
        visible &= (j[None, :] < SINK) | (j[None, :] > t - RECENT)
        if SLIDING > 0:
            visible &= j[None, :] > t - SLIDING
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(logits - new_top[:, None])
        acc *= shrink[:, None]
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if values.dtype == tl.float32:
            acc = dot(p, values, acc)
        elif values.dtype == tl.float16:
            acc = dot(p.to(tl.float16), values, acc)
        else:  # 8 bits of p would be too few
            rounded = p.to(tl.bfloat16)
            acc = dot(rounded, values, acc)
            acc = dot((p - rounded.to(tl.float32)).to(tl.bfloat16), values, acc)
    keep = row_exists[:, None] & in_row[None, :]
    tl.store(acc_at[:, None] + channels[None, :], acc, mask=keep)
    tl.store(maxima_at, top, mask=row_exists)
    tl.store(sums_at, total, mask=row_exists)
