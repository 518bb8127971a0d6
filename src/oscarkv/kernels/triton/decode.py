"""Decode: a few query tokens of every sequence over the packed history and the exact windows.

Two launches. `_attend` runs one program for each (split, row block of a sequence, KV head). Split 0
reads the exact windows; the others share the sequence's history, by lengths read on the device, and
leave sums that `merge.py` brings together by log-sum-exp. Their number depends on shapes alone, so
a step can be captured in a graph.

Codes go to the matrix unit as they are (`unpack.py`); parameters stay outside the products:

    q . k     = s (q' . c) + lo sum(q') + q . m        q' = q A^-T, made by every program for itself
    sum p v'  = sum (p s) c + sum p lo

All logits are in powers of two. The weight of a value is w = p s = 2^(logit + log2 s - m), with m
the running maximum of that exponent, so it never leaves the range of fp16 whatever the scales are;
p itself is w / s. A row's q' is multiplied by a power of two that brings it to the top of fp16.
Sums of q' and of w are those of the rounded numbers, so that rounding errors act on s c + lo and
not on its two large parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.triton import constants
from oscarkv.kernels.triton.merge import merge
from oscarkv.kernels.triton.parameters import BYTES, FORMATS, load_grid
from oscarkv.kernels.triton.portable import bound, dot
from oscarkv.kernels.triton.unpack import channel_of, slot_weight, unpack


@dataclass(frozen=True)
class Tuning:
    """How the work of `_attend` is cut. One warp a program: then nothing that is unpacked ever
    leaves its thread, and no step of the softmax waits for another warp."""

    block: int = 64  # history tokens at a time
    warps: int = 1
    stages: int = 5  # of the pipeline; two for each block of words under way, and one
    registers: int | None = 168  # limit for the compiler: 12 programs on a multiprocessor
    programs_per_sm: int = 16  # that the splits aim at
    split_tokens: int = 256  # fewer are not worth a split of their own
    max_splits: int = 256
    window_block: int = 32  # window tokens at a time


TUNING = Tuning()

_EMPTY = tl.constexpr(-1.0e30)  # the exponent of a sum of nothing
_TOP = tl.constexpr(14.0)  # weights reach 2^14: fp16 then holds all down to 2^-28 of the largest
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cap(logits, soft_cap, SOFT_CAP: tl.constexpr):
    """Powers of two from logits: with a soft cap in nature's units, without one in these."""
    if SOFT_CAP:
        turned = tl.exp2(logits * (2.0 * _LOG2E / soft_cap))
        logits = soft_cap * _LOG2E * (1.0 - 2.0 / (1.0 + turned))
    return logits


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _query_columns(
    q,
    rows_at,
    row_exists,
    high,
    low,
    FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
):
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
    return _fragment_order(total)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """[rows, n] -> [rows / 8, PARTS, 8, n]: one copy of 8 rows after the other."""
    EIGHTS: tl.constexpr = x.shape[0] // 8
    x = tl.reshape(x, (EIGHTS, 1, 8, x.shape[1]))
    return tl.broadcast_to(x, (EIGHTS, PARTS, 8, x.shape[3]))


@triton.jit
def _high_low(x):
    """fp32 [rows, n] -> fp16 [2 rows, n]: 8 rows rounded, then what rounding lost, and so on."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    both = tl.reshape(tl.join(high, low), (x.shape[0] // 8, 8, x.shape[1], 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), (2 * x.shape[0], x.shape[1]))


@triton.jit
def _fragment_order(x):
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
def _query_parts(x, part, columns, GROUPS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
                 WORDS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
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
def _join_parts(x, columns, PARTS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
                BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Sums of the parts' weights with all codes -> of each column with its own group's weights."""
    M: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (M // PARTS // 8, PARTS, 8, x.shape[1]))
    if GROUPS > 1:
        group = channel_of(columns, BITS, WORDS, PADDED, False) // (DIM // GROUPS)
        mine = group[None, None, None, :] == tl.arange(0, PARTS)[None, :, None, None]
        x = tl.where(mine, x, 0.0)
    return tl.reshape(tl.sum(x, 1), (M // PARTS, x.shape[3]))


@triton.jit(do_not_specialize=["splits", "history_table_row", "window_table_row"])
def _attend(
    q, acc, offsets_acc, window_acc, maxima, sums,
    history, window, history_table, window_table, seq_lens, query_start,
    query_high, query_low, key_mean, exponents,
    scale, soft_cap, splits, history_table_row, history_table_step, window_table_row,
    window_table_step, q_token, q_head,
    HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, MULTI: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr,
    SLIDING: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, WINDOW_PAGE_STRIDE: tl.constexpr, WINDOW_HEAD_STRIDE: tl.constexpr,
    WINDOW_SIDE_STRIDE: tl.constexpr, WINDOW_TOKEN_STRIDE: tl.constexpr,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, PARAMETER_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, V_AT: tl.constexpr, KP_AT: tl.constexpr,
    VP_AT: tl.constexpr, BLOCK: tl.constexpr, WINDOW_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split, sequence, head = tl.program_id(0), tl.program_id(1) // ROW_BLOCKS, tl.program_id(2)
    row_block = tl.program_id(1) % ROW_BLOCKS
    start = tl.load(query_start + sequence)
    new = tl.load(query_start + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    if row_block * ROWS < new * GROUP_ROWS:
        row_exists = rows < new * GROUP_ROWS
        rows_at = (start + rows // GROUP_ROWS).to(tl.int64) * q_token
        rows_at += (head * GROUP_ROWS + rows % GROUP_ROWS) * q_head
        first = length - new  # position of the first query
        positions = first + rows // GROUP_ROWS
        at = ((sequence * HEADS + head) * ROW_BLOCKS * ROWS + rows).to(tl.int64)
        if split == 0:
            _attend_windows(
                q, rows_at, row_exists, positions, first, length, window_acc + at * DIM,
                maxima + at * (splits + 1), sums + at * (splits + 1),
                window + head * WINDOW_HEAD_STRIDE,
                window_table + sequence.to(tl.int64) * window_table_row, window_table_step,
                scale, soft_cap, DIM, SINK, RECENT, SLIDING, SOFT_CAP, WINDOW_PAGE_STRIDE,
                WINDOW_SIDE_STRIDE, WINDOW_TOKEN_STRIDE, WINDOW_BLOCK,
            )  # fmt: skip
        else:
            _attend_history(
                q, row_block * ROWS, head * GROUP_ROWS, q_token, q_head, start, positions,
                row_exists, first, length, at, split - 1, splits,
                acc, offsets_acc, maxima + at * (splits + 1) + split,
                sums + at * (splits + 1) + split,
                history + head * HEAD_STRIDE,
                history_table + sequence.to(tl.int64) * history_table_row, history_table_step,
                query_high, query_low, key_mean + head * DIM, exponents, head, scale, soft_cap,
                HEADS, GROUP_ROWS, DIM, MULTI, SINK, RECENT, SLIDING, SOFT_CAP, PAGE, PAGE_STRIDE,
                GROUPS, FORMAT, PARAMETER_BYTES, KEY_BITS, VALUE_BITS, V_AT, KP_AT, VP_AT, BLOCK,
                STAGES,
            )  # fmt: skip


@triton.jit
def _attend_windows(
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
    factor = scale if SOFT_CAP else scale * _LOG2E
    sink_end = tl.minimum(SINK, length)
    oldest = tl.maximum(first - RECENT + 1, SINK)
    if SLIDING > 0:
        oldest = tl.maximum(oldest, first - SLIDING + 1)
        sink_end = tl.where(first - SLIDING + 1 < SINK, sink_end, 0)
    oldest = oldest // 16 * 16
    sink_blocks = tl.cdiv(sink_end, BLOCK)
    blocks = sink_blocks + tl.cdiv(tl.maximum(length - oldest, 0), BLOCK)
    top = tl.full((ROWS,), _EMPTY, tl.float32)
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
        logits = _cap(logits, soft_cap, SOFT_CAP)
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


@triton.jit
def _attend_history(
    q, query_rows, query_head, q_token, q_head, start, positions, row_exists, first, length, at,
    split, splits, acc_out, offsets_out, maxima_at, sums_at, history, table, table_step,
    query_high, query_low, key_mean, exponents, head, scale, soft_cap,
    HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, MULTI: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, SLIDING: tl.constexpr, SOFT_CAP: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    PARAMETER_BYTES: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    V_AT: tl.constexpr, KP_AT: tl.constexpr, VP_AT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One split of the packed history."""
    ROWS: tl.constexpr = positions.shape[0]
    EIGHTS: tl.constexpr = ROWS // 8
    # Words of the two bit planes, and their padded numbers; 3 bits: a plane of 2 and one of 1.
    K_BITS: tl.constexpr = 2 if KEY_BITS == 3 else KEY_BITS
    V_BITS: tl.constexpr = 2 if VALUE_BITS == 3 else VALUE_BITS
    KW: tl.constexpr = (DIM * K_BITS + 31) // 32
    VW: tl.constexpr = (DIM * V_BITS + 31) // 32
    HW: tl.constexpr = (DIM + 31) // 32
    KWP: tl.constexpr = triton.next_power_of_2(KW)
    VWP: tl.constexpr = triton.next_power_of_2(VW)
    HWP: tl.constexpr = triton.next_power_of_2(HW)
    K_COLUMNS: tl.constexpr = KWP * 32 // K_BITS
    V_COLUMNS: tl.constexpr = VWP * 32 // V_BITS
    H_COLUMNS: tl.constexpr = HWP * 32
    K_ALL: tl.constexpr = K_COLUMNS + (H_COLUMNS if KEY_BITS == 3 else 0)
    V_ALL: tl.constexpr = V_COLUMNS + (H_COLUMNS if VALUE_BITS == 3 else 0)
    # Rows of the matrix unit come in parts of 8. One group: a number is the sum of two fp16 ones,
    # in two parts. More groups: each has a part of its own, with one fp16 number.
    PARTS: tl.constexpr = 2 if GROUPS == 1 else triton.next_power_of_2(GROUPS)
    M: tl.constexpr = PARTS * ROWS

    # Which blocks are this split's, and which of them every query reads in full.
    oldest, newest_oldest = SINK, SINK
    if SLIDING > 0:
        oldest = tl.maximum(SINK, first - SLIDING + 1)
        newest_oldest = tl.maximum(SINK, length - SLIDING)
    end = length - RECENT  # no query reads a key from here on packed
    begin = oldest // BLOCK * BLOCK
    blocks = tl.where(end > oldest, tl.cdiv(end - begin, BLOCK), 0)
    share = tl.cdiv(blocks, splits)
    first_block = tl.minimum(split * share, blocks)
    last_block = tl.minimum(first_block + share, blocks)
    full_first = tl.cdiv(newest_oldest - begin, BLOCK)
    full_last = tl.maximum(first - RECENT + 1 - begin, 0) // BLOCK
    full_first = tl.minimum(tl.maximum(full_first, first_block), last_block)
    full_last = tl.minimum(tl.maximum(full_last, full_first), last_block)
    if first_block >= last_block:
        tl.store(maxima_at, tl.full((ROWS,), _EMPTY, tl.float32), mask=row_exists)
    else:
        # q', and what of it multiplies offsets and mean. All parts of a row compute the same.
        factor = scale if SOFT_CAP else scale * _LOG2E
        units = tl.arange(0, M)
        part = units // 8 % PARTS
        rows = query_rows + units // (8 * PARTS) * 8 + units % 8
        exists = rows // GROUP_ROWS < length - first
        rows_at = (start + rows // GROUP_ROWS).to(tl.int64) * q_token
        rows_at += (query_head + rows % GROUP_ROWS) * q_head
        high, low = query_high + head * DIM * K_ALL, query_low + head * DIM * K_ALL
        turned = factor * _query_columns(q, rows_at, exists, high, low, 0, K_COLUMNS, K_ALL, DIM)
        largest = tl.max(tl.abs(turned), 1)
        if KEY_BITS == 3:
            turned_high = factor * _query_columns(
                q, rows_at, exists, high, low, K_COLUMNS, H_COLUMNS, K_ALL, DIM
            )
            largest = tl.maximum(largest, tl.max(tl.abs(turned_high), 1))
        power = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        power = tl.minimum(tl.maximum(power, -100), 100)
        up, down = _power_of_two(14 - power), _power_of_two(power - 14)
        columns = tl.arange(0, K_COLUMNS)
        codes_q = _query_parts(turned * up[:, None], part, columns, GROUPS, DIM, K_BITS, KW, KWP)
        codes_q_high = codes_q
        if KEY_BITS == 3:
            codes_q_high = _query_parts(
                turned_high * up[:, None], part, tl.arange(0, H_COLUMNS), GROUPS, DIM, 1, HW, HWP
            )
        q_sums = tl.sum(codes_q.to(tl.float32) * slot_weight(columns, K_BITS, KWP)[None, :], 1)
        q_sums = tl.reshape(q_sums * down, (EIGHTS, PARTS, 8))
        WIDTH: tl.constexpr = triton.next_power_of_2(DIM)
        channels = tl.arange(0, WIDTH)
        in_row = channels < DIM
        mean = tl.load(key_mean + channels, mask=in_row, other=0.0)
        raw = tl.load(
            q + rows_at[:, None] + channels[None, :],
            mask=exists[:, None] & in_row[None, :],
            other=0.0,
        )
        means = factor * tl.sum(raw.to(tl.float32) * mean[None, :], 1)
        q_mean = tl.max(tl.reshape(means, (EIGHTS, PARTS, 8)), 1)
        down = tl.max(tl.reshape(down * 16777216.0, (EIGHTS, PARTS, 8)), 1)
        q_mean, down = tl.reshape(q_mean, (ROWS,)), tl.reshape(down, (ROWS,))
        q_sum = q_sums
        if GROUPS == 1:
            q_sum = tl.reshape(tl.sum(q_sums, 1), (ROWS,))
        key_exponent = tl.load(exponents + head).to(tl.float32)
        value_exponent = tl.load(exponents + HEADS + head).to(tl.float32)

        top = tl.full((ROWS,), _EMPTY, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        power_v = -126
        offset_sum = tl.zeros((ROWS,), tl.float32)
        if GROUPS > 1:
            offset_sum = tl.zeros((EIGHTS, PARTS, 8), tl.float32)
        acc = tl.zeros((M, V_COLUMNS), tl.float32)
        acc_high = acc
        if VALUE_BITS == 3:
            acc_high = tl.zeros((M, H_COLUMNS), tl.float32)

        head_edge = full_first - first_block
        edges = head_edge + last_block - full_last
        for edge in tl.range(0, bound(edges), num_stages=1):
            block = tl.where(edge < head_edge, first_block + edge, full_last + edge - head_edge)
            top, total, power_v, offset_sum, acc, acc_high = _history_block(
                begin + block * BLOCK, top, total, power_v, offset_sum, acc, acc_high,
                codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
                history, table, table_step, key_exponent, value_exponent, soft_cap,
                True, MULTI, DIM, RECENT, SLIDING, SOFT_CAP, PAGE, PAGE_STRIDE, PARTS, GROUPS,
                FORMAT, PARAMETER_BYTES, KEY_BITS, VALUE_BITS, V_AT, KP_AT, VP_AT, BLOCK,
            )  # fmt: skip
        for block in tl.range(bound(full_first), bound(full_last), num_stages=STAGES):
            top, total, power_v, offset_sum, acc, acc_high = _history_block(
                begin + block * BLOCK, top, total, power_v, offset_sum, acc, acc_high,
                codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
                history, table, table_step, key_exponent, value_exponent, soft_cap,
                False, MULTI, DIM, RECENT, SLIDING, SOFT_CAP, PAGE, PAGE_STRIDE, PARTS, GROUPS,
                FORMAT, PARAMETER_BYTES, KEY_BITS, VALUE_BITS, V_AT, KP_AT, VP_AT, BLOCK,
            )  # fmt: skip

        row = at * splits + split
        out = acc_out + row[:, None] * V_ALL
        # Weights were p s 2^(13 - power_v), codes times 2^-24.
        unit = _power_of_two(tl.minimum(power_v + 11, 127))
        v_columns, h_columns = tl.arange(0, V_COLUMNS), tl.arange(0, H_COLUMNS)
        sums = _join_parts(acc, v_columns, PARTS, GROUPS, DIM, V_BITS, VW, VWP) * unit
        tl.store(out + v_columns[None, :], sums, mask=row_exists[:, None])
        if VALUE_BITS == 3:
            sums = _join_parts(acc_high, h_columns, PARTS, GROUPS, DIM, 1, HW, HWP) * unit
            tl.store(out + V_COLUMNS + h_columns[None, :], sums, mask=row_exists[:, None])
        if GROUPS == 1:
            tl.store(offsets_out + row, offset_sum, mask=row_exists)
        else:
            groups = tl.arange(0, PARTS)
            tl.store(
                offsets_out + row[:, None] * GROUPS + groups[None, :],
                tl.reshape(tl.permute(offset_sum, (0, 2, 1)), (ROWS, PARTS)),
                mask=row_exists[:, None] & (groups < GROUPS)[None, :],
            )
        tl.store(maxima_at, top, mask=row_exists)
        tl.store(sums_at, total, mask=row_exists)


@triton.jit
def _load_words(words, at, exists, word, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """Rows of packed words [tokens, words], the padding zero."""
    pointers = words + at[:, None] + word[None, :]
    if MASKED:
        packed = tl.load(pointers, mask=exists[:, None] & (word < WORDS)[None, :], other=0)
    elif word.shape[0] == WORDS:
        packed = tl.load(pointers)
    else:
        packed = tl.load(pointers, mask=(word < WORDS)[None, :], other=0)
    return packed


@triton.jit
def _history_block(
    j0, top, total, power_v, offset_sum, acc, acc_high,
    codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
    history, table, table_step, key_exponent, value_exponent, soft_cap,
    MASKED: tl.constexpr, MULTI: tl.constexpr, DIM: tl.constexpr, RECENT: tl.constexpr,
    SLIDING: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, PARAMETER_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, V_AT: tl.constexpr, KP_AT: tl.constexpr,
    VP_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of the history, from j0 on. Unless MASKED, every query reads all of them."""
    ROWS: tl.constexpr = top.shape[0]
    M: tl.constexpr = PARTS * ROWS
    EIGHTS: tl.constexpr = ROWS // 8
    K_BITS: tl.constexpr = 2 if KEY_BITS == 3 else KEY_BITS
    V_BITS: tl.constexpr = 2 if VALUE_BITS == 3 else VALUE_BITS
    KW: tl.constexpr = (DIM * K_BITS + 31) // 32
    VW: tl.constexpr = (DIM * V_BITS + 31) // 32
    HW: tl.constexpr = (DIM + 31) // 32
    K_ROW: tl.constexpr = KW + (HW if KEY_BITS == 3 else 0)  # words of a row, both planes
    V_ROW: tl.constexpr = VW + (HW if VALUE_BITS == 3 else 0)
    v_tokens = tl.arange(0, BLOCK)
    # Such that `_fragment_order` brings logits, a column for each of these, to the values' order.
    tokens = (v_tokens & -15) | ((v_tokens & 6) << 1) | ((v_tokens & 8) >> 2)
    j, v_j = j0 + tokens, j0 + v_tokens
    exists, v_exists = (j >= oldest) & (j < end), (v_j >= oldest) & (v_j < end)
    words = history.to(tl.pointer_type(tl.int32))
    ROW_PARAMETERS: tl.constexpr = GROUPS * PARAMETER_BYTES
    if PAGE % BLOCK == 0:  # then a block lies in one page, and addresses differ by constants
        page = tl.load(table + (j0 // PAGE).to(tl.int64) * table_step).to(tl.int64)
        inside = j0 % PAGE
        k_words = words + (page * (PAGE_STRIDE // 4) + inside * K_ROW)
        v_words = words + (page * (PAGE_STRIDE // 4) + inside * V_ROW)
        k_stored = history + (page * PAGE_STRIDE + inside * ROW_PARAMETERS)
        k_at, v_at, stored_at = tokens * K_ROW, v_tokens * V_ROW, tokens * ROW_PARAMETERS
    else:
        column, v_column = (j // PAGE).to(tl.int64), (v_j // PAGE).to(tl.int64)
        if MASKED:
            page = tl.load(table + column * table_step, mask=exists, other=0).to(tl.int64)
            v_page = tl.load(table + v_column * table_step, mask=v_exists, other=0).to(tl.int64)
        else:
            page = tl.load(table + column * table_step).to(tl.int64)
            v_page = tl.load(table + v_column * table_step).to(tl.int64)
        k_words, v_words, k_stored = words, words, history
        k_at = page * (PAGE_STRIDE // 4) + j % PAGE * K_ROW
        v_at = v_page * (PAGE_STRIDE // 4) + v_j % PAGE * V_ROW
        stored_at = page * PAGE_STRIDE + j % PAGE * ROW_PARAMETERS
    v_words += V_AT // 4
    v_stored = k_stored + VP_AT
    k_stored += KP_AT
    groups = tl.arange(0, PARTS)

    # Logits, as powers of two.
    word, high_word = (
        tl.arange(0, triton.next_power_of_2(KW)),
        tl.arange(0, triton.next_power_of_2(HW)),
    )
    codes = unpack(_load_words(k_words, k_at, exists, word, KW, MASKED), K_BITS, True)
    products = dot(codes_q, tl.trans(codes), tl.zeros((M, BLOCK), tl.float32))
    if KEY_BITS == 3:
        packed = _load_words(k_words + KW, k_at, exists, high_word, HW, MASKED)
        products = dot(codes_q_high, tl.trans(unpack(packed, 1, True)), products)
    products = tl.reshape(products, (EIGHTS, PARTS, 8, BLOCK))
    if GROUPS == 1:
        s, lo = load_grid(k_stored, stored_at, exists, key_exponent, FORMAT, 2**KEY_BITS, MASKED)
        logits = tl.reshape(tl.sum(products, 1), (ROWS, BLOCK)) * down[:, None]
        logits = logits * s[None, :] + (lo[None, :] * q_sum[:, None] + q_mean[:, None])
    else:
        present = (groups < GROUPS)[:, None] & exists[None, :]
        all_at = stored_at[None, :] + groups[:, None] * PARAMETER_BYTES
        s, lo = load_grid(k_stored, all_at, present, key_exponent, FORMAT, 2**KEY_BITS, True)
        products *= tl.reshape(down, (EIGHTS, 1, 8, 1))
        products = products * s[None, :, None, :] + lo[None, :, None, :] * q_sum[:, :, :, None]
        logits = tl.reshape(tl.sum(products, 1), (ROWS, BLOCK)) + q_mean[:, None]
    logits = _cap(logits, soft_cap, SOFT_CAP)
    if MASKED:
        visible = exists[None, :]
        if MULTI:
            visible &= j[None, :] <= positions[:, None] - RECENT
            if SLIDING > 0:
                visible &= j[None, :] > positions[:, None] - SLIDING
        logits = tl.where(visible, logits, float("-inf"))

    # Probabilities; and weights, brought to the range of fp16 by the largest scale so far.
    new_top = tl.maximum(top, tl.max(logits, 1))
    shrink = tl.exp2(top - new_top)
    top = new_top
    p = tl.exp2(logits - top[:, None])
    total = total * shrink + tl.sum(p, 1)
    if GROUPS == 1:
        s, lo = load_grid(
            v_stored, stored_at, exists, value_exponent, FORMAT, 2**VALUE_BITS, MASKED
        )
        offset_sum = offset_sum * shrink + tl.sum(p * lo[None, :], 1)
        largest = tl.max(s, 0)
    else:
        s, lo = load_grid(v_stored, all_at, present, value_exponent, FORMAT, 2**VALUE_BITS, True)
        shares = _parts(p, PARTS)
        offset_sum *= tl.reshape(shrink, (EIGHTS, 1, 8))
        offset_sum += tl.sum(shares * lo[None, :, None, :], 3)
        largest = tl.max(tl.max(s, 0), 0)
    new_power = tl.maximum(power_v, ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127)
    shrink *= _power_of_two(tl.maximum(power_v - new_power, -126))
    power_v = new_power
    s *= _power_of_two(tl.minimum(13 - power_v, 127))
    if GROUPS == 1:
        weights = _high_low(p * s[None, :])
    else:
        weights = tl.reshape((shares * s[None, :, None, :]).to(tl.float16), (M, BLOCK))
    weights = _fragment_order(weights)
    shrink_parts = tl.reshape(_parts(shrink[:, None], PARTS), (M, 1))

    word = tl.arange(0, triton.next_power_of_2(VW))
    codes = unpack(_load_words(v_words, v_at, v_exists, word, VW, MASKED), V_BITS, False)
    acc = dot(weights, codes, acc * shrink_parts)
    if VALUE_BITS == 3:
        packed = _load_words(v_words + VW, v_at, v_exists, high_word, HW, MASKED)
        acc_high = dot(weights, unpack(packed, 1, False), acc_high * shrink_parts)
    else:
        acc_high = acc
    return top, total, power_v, offset_sum, acc, acc_high


# -- host ----------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: several splits, to be tested, but few
    return torch.cuda.get_device_properties(device).multi_processor_count


def _splits(programs: int, tokens: int, device: torch.device, tuning: Tuning) -> int:
    """Into how many parts each history is cut, from shapes alone."""
    wanted = multiprocessors(device) * tuning.programs_per_sm // max(programs, 1)
    return max(1, min(wanted, tokens // tuning.split_tokens, tuning.max_splits))


def decode(
    plan: Plan, q: Tensor, layer: LayerCache, out: Tensor, tuning: Tuning | None = None
) -> None:
    """Attention of the plan's last tokens, q [tokens, query heads, d], over what is stored."""
    tuning = TUNING if tuning is None else tuning
    layout, window = layer.layout, layer.window
    heads, dim, batch = layer.kv_heads, layout.head_dim, plan.batch
    if not batch or not q.shape[0]:
        return
    if q.stride(-1) != 1:
        q = q.contiguous()
    group = q.shape[1] // heads
    block_rows = 8 if plan.max_query_len * group <= 8 else 16
    row_blocks = -(-plan.max_query_len * group // block_rows)
    rows = row_blocks * block_rows
    tokens = plan.history_table.shape[1] * layout.page_size
    splits = _splits(batch * heads * row_blocks, tokens, q.device, tuning)
    columns = sum(constants.columns(plane) for plane in layout.value_row.planes)

    units = batch * heads * rows
    sizes = (
        units * splits * columns,  # history sums
        units * splits * layout.groups,  # their offsets
        units * dim,  # window sums
        units * (splits + 1),  # exponents
        units * (splits + 1),  # sums of probabilities
    )
    # One allocation, made anew: a captured graph keeps its own.
    workspace = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    acc, offsets, window_acc, maxima, sums = workspace.split(sizes)

    query_high, query_low = constants.query_matrices(layer)
    parts = 2 if layout.groups == 1 else int(triton.next_power_of_2(layout.groups))
    warps = tuning.warps * max(1, min(4, parts * block_rows // 16))
    wide = max(columns, query_high.shape[-1]) > 128  # twice the registers for q' and the sums
    block = max(16, tuning.block // 2) if wide else tuning.block
    small = not wide and parts * block_rows == 16
    _, v_at, kp_at, vp_at, _ = layout.offsets
    parameter_format = FORMATS[layout.parameter_format]
    options = {"maxnreg": tuning.registers} if small and tuning.registers else {}
    _attend[(splits + 1, batch * row_blocks, heads)](
        q, acc, offsets, window_acc, maxima, sums,
        layer.history, window, plan.history_table, plan.window_table, plan.seq_lens,
        plan.query_start_loc, query_high, query_low, constants.key_mean(layer),
        constants.exponents(layer), layer.scale, layer.soft_cap or 0.0, splits,
        plan.history_table.stride(0), plan.history_table.stride(1), plan.window_table.stride(0),
        plan.window_table.stride(1), q.stride(0), q.stride(1),
        HEADS=heads, GROUP_ROWS=group, DIM=dim, ROWS=block_rows, ROW_BLOCKS=row_blocks,
        MULTI=plan.max_query_len > 1, SINK=layer.sink, RECENT=layer.recent,
        SLIDING=layer.sliding_window or 0, SOFT_CAP=layer.soft_cap is not None,
        PAGE=layout.page_size, PAGE_STRIDE=layer.history.stride(0),
        HEAD_STRIDE=layer.history.stride(1), WINDOW_PAGE_STRIDE=window.stride(0),
        WINDOW_HEAD_STRIDE=window.stride(1), WINDOW_SIDE_STRIDE=window.stride(2),
        WINDOW_TOKEN_STRIDE=window.stride(3), GROUPS=layout.groups, FORMAT=parameter_format,
        PARAMETER_BYTES=BYTES[parameter_format], KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits, V_AT=v_at, KP_AT=kp_at, VP_AT=vp_at, BLOCK=block,
        WINDOW_BLOCK=tuning.window_block if dim <= 128 else 16, STAGES=tuning.stages,
        num_warps=warps, num_stages=tuning.stages, **options,
    )  # fmt: skip
    merge(plan, layer, out, acc, offsets, window_acc, maxima, sums, splits, rows, group)
