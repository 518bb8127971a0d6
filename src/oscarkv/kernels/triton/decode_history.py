"""One split of decode's packed history: q', the blocks, and the sums they leave."""

import triton
import triton.language as tl

from oscarkv.kernels.triton.decode_block import history_block
from oscarkv.kernels.triton.decode_operands import join_parts, query_columns, query_parts
from oscarkv.kernels.triton.portable import bound
from oscarkv.kernels.triton.powers import EMPTY, LOG2E, power_of_two
from oscarkv.kernels.triton.unpack import low_bits, plane_words, slot_weight


@triton.jit
def attend_history(
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
    # Words of the two bit planes, and their padded numbers.
    K_BITS: tl.constexpr = low_bits(KEY_BITS)
    V_BITS: tl.constexpr = low_bits(VALUE_BITS)
    KW: tl.constexpr = plane_words(DIM, K_BITS)
    VW: tl.constexpr = plane_words(DIM, V_BITS)
    HW: tl.constexpr = plane_words(DIM, 1)
    KWP: tl.constexpr = triton.next_power_of_2(KW)
    VWP: tl.constexpr = triton.next_power_of_2(VW)
    HWP: tl.constexpr = triton.next_power_of_2(HW)
    K_COLUMNS: tl.constexpr = KWP * 32 // K_BITS
    V_COLUMNS: tl.constexpr = VWP * 32 // V_BITS
    H_COLUMNS: tl.constexpr = HWP * 32
    K_ALL: tl.constexpr = K_COLUMNS + (H_COLUMNS if KEY_BITS == 3 else 0)
    V_ALL: tl.constexpr = V_COLUMNS + (H_COLUMNS if VALUE_BITS == 3 else 0)
    # Of the matrix unit's rows: see decode_operands.py.
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
        tl.store(maxima_at, tl.full((ROWS,), EMPTY, tl.float32), mask=row_exists)
    else:
        # q', and what of it multiplies offsets and mean. All parts of a row compute the same.
        factor = scale if SOFT_CAP else scale * LOG2E
        units = tl.arange(0, M)
        part = units // 8 % PARTS
        rows = query_rows + units // (8 * PARTS) * 8 + units % 8
        exists = rows // GROUP_ROWS < length - first
        rows_at = (start + rows // GROUP_ROWS).to(tl.int64) * q_token
        rows_at += (query_head + rows % GROUP_ROWS) * q_head
        high, low = query_high + head * DIM * K_ALL, query_low + head * DIM * K_ALL
        turned = factor * query_columns(q, rows_at, exists, high, low, 0, K_COLUMNS, K_ALL, DIM)
        largest = tl.max(tl.abs(turned), 1)
        if KEY_BITS == 3:
            turned_high = factor * query_columns(
                q, rows_at, exists, high, low, K_COLUMNS, H_COLUMNS, K_ALL, DIM
            )
            largest = tl.maximum(largest, tl.max(tl.abs(turned_high), 1))
        power = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        power = tl.minimum(tl.maximum(power, -100), 100)
        up, down = power_of_two(14 - power), power_of_two(power - 14)
        columns = tl.arange(0, K_COLUMNS)
        codes_q = query_parts(turned * up[:, None], part, columns, GROUPS, DIM, K_BITS, KW, KWP)
        codes_q_high = codes_q
        if KEY_BITS == 3:
            codes_q_high = query_parts(
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

        top = tl.full((ROWS,), EMPTY, tl.float32)
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
            top, total, power_v, offset_sum, acc, acc_high = history_block(
                begin + block * BLOCK, top, total, power_v, offset_sum, acc, acc_high,
                codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
                history, table, table_step, key_exponent, value_exponent, soft_cap,
                True, MULTI, DIM, RECENT, SLIDING, SOFT_CAP, PAGE, PAGE_STRIDE, PARTS, GROUPS,
                FORMAT, PARAMETER_BYTES, KEY_BITS, VALUE_BITS, V_AT, KP_AT, VP_AT, BLOCK,
            )  # fmt: skip
        for block in tl.range(bound(full_first), bound(full_last), num_stages=STAGES):
            top, total, power_v, offset_sum, acc, acc_high = history_block(
                begin + block * BLOCK, top, total, power_v, offset_sum, acc, acc_high,
                codes_q, codes_q_high, down, q_sum, q_mean, positions, oldest, end,
                history, table, table_step, key_exponent, value_exponent, soft_cap,
                False, MULTI, DIM, RECENT, SLIDING, SOFT_CAP, PAGE, PAGE_STRIDE, PARTS, GROUPS,
                FORMAT, PARAMETER_BYTES, KEY_BITS, VALUE_BITS, V_AT, KP_AT, VP_AT, BLOCK,
            )  # fmt: skip

        row = at * splits + split
        out = acc_out + row[:, None] * V_ALL
        # Weights were p s 2^(13 - power_v), codes times 2^-24.
        unit = power_of_two(tl.minimum(power_v + 11, 127))
        v_columns, h_columns = tl.arange(0, V_COLUMNS), tl.arange(0, H_COLUMNS)
        sums = join_parts(acc, v_columns, PARTS, GROUPS, DIM, V_BITS, VW, VWP) * unit
        tl.store(out + v_columns[None, :], sums, mask=row_exists[:, None])
        if VALUE_BITS == 3:
            sums = join_parts(acc_high, h_columns, PARTS, GROUPS, DIM, 1, HW, HWP) * unit
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
