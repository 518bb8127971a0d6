"""The prefill kernel: which keys a block of query rows reads, and from where.

First the history, then the exact keys: the stored windows' and the chunk's own.
"""

import triton
import triton.language as tl

from oscarkv.kernels.triton.portable import bound
from oscarkv.kernels.triton.prefill_history import history_sides
from oscarkv.kernels.triton.prefill_softmax import LOWEST, attend
from oscarkv.kernels.triton.prefill_transforms import back_transformed, transformed_queries


@triton.jit
def _attend_history(
    j, ok, t, queries, rates, shifts, maximum, total, acc, page_codes, page_parameters,
    table, codes_page, parameters_page, table_column, cap, recent, sliding,
    ALIGN: tl.constexpr, PARAMETER_ALIGN: tl.constexpr, PAGE: tl.constexpr,
    VALUE_START: tl.constexpr, KEY_PARAMETERS: tl.constexpr, VALUE_PARAMETERS: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The history's tokens j, those that are `ok`. Unless MASKED, every row reads all of them."""
    keys, values = history_sides(
        page_codes, page_parameters, table, j, ok, codes_page, parameters_page, table_column,
        ALIGN, PARAMETER_ALIGN, PAGE, VALUE_START, KEY_PARAMETERS, VALUE_PARAMETERS, KEY_BITS,
        VALUE_BITS, COLUMNS, HEAD_DIM, GROUPS, FORMAT, MASKED, ASM,
    )  # fmt: skip
    seen = True
    if MASKED:
        age = t[:, None] - j[None, :]
        seen = ok[None, :] & (age >= recent) & (age < sliding)
    return attend(
        queries, keys, values, rates, shifts, seen, maximum, total, acc, cap, CAPPED, MASKED, ASM
    )


@triton.jit(
    # Engines pass rows of larger tables: each beginning would be compiled for.
    do_not_specialize=["history_table_row", "window_table_row"],
    do_not_specialize_on_alignment=[
        "seq_lens",
        "query_start_loc",
        "history_table",
        "window_table",
    ],
)
def prefill_kernel(
    q, k, v, out, codes, parameters, window, query_matrix, value_matrix, key_mean, value_mean,
    seq_lens, query_start_loc, history_table, window_table,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, out_channel,
    codes_page, codes_head, parameters_page, parameters_head,
    window_page, window_head, window_side, window_token, window_channel,
    history_table_row, history_table_column, window_table_row, window_table_column,
    rate, cap, sink, recent, sliding,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr, FORMAT: tl.constexpr, VALUE_START: tl.constexpr,
    KEY_PARAMETERS: tl.constexpr, VALUE_PARAMETERS: tl.constexpr, ALIGN: tl.constexpr,
    PARAMETER_ALIGN: tl.constexpr, STRICT: tl.constexpr, CAPPED: tl.constexpr,
    FOLDED: tl.constexpr, VALUE_MEAN: tl.constexpr, EXACT_QUERIES: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, HISTORY_N: tl.constexpr, EXACT_N: tl.constexpr,
    TRANSFORM_N: tl.constexpr, SLICE: tl.constexpr, INDEX: tl.constexpr,
    HISTORY_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr,
):  # fmt: skip
    # The last rows see the most keys: they go first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    chunk = tl.load(query_start_loc + sequence)
    new = tl.load(query_start_loc + sequence + 1) - chunk
    if first >= new * GROUP:
        return
    begin = tl.load(seq_lens + sequence) - new  # the chunk's first position
    row = first + tl.arange(0, BLOCK_M)
    real = row < new * GROUP
    t = begin + row // GROUP
    t0 = begin + first // GROUP  # these queries lie at t0 .. t1 - 1
    t1 = begin + (tl.minimum(first + BLOCK_M, new * GROUP) - 1) // GROUP + 1

    channel = tl.arange(0, COLUMNS)
    in_head = (channel < HEAD_DIM)[None, :]
    row_token = (chunk + row // GROUP).to(tl.int64)
    row_head = (head * GROUP + row % GROUP).to(INDEX)
    rows = q + row_token * q_token + row_head * q_head
    maximum = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)

    # -- the history: sink <= j <= t - recent, and before the chunk unless the plan is strict ------
    low = tl.maximum(sink, t0 - sliding + 1)
    high = t1 - recent
    full = t0 - recent + 1  # before this, all rows read all keys
    if not STRICT:
        high = tl.minimum(high, begin)
        full = tl.minimum(full, begin)
    if high > low:
        square = head.to(tl.int64) * (COLUMNS * COLUMNS)
        rest = tl.num_programs(1).to(tl.int64) * (COLUMNS * COLUMNS)
        queries, unit, middle = transformed_queries(
            rows, real, query_matrix + square, query_matrix + rest + square,
            key_mean + head * HEAD_DIM, HEAD_DIM, COLUMNS, BLOCK_M, TRANSFORM_N, EXACT_QUERIES,
        )  # fmt: skip
        rates = unit * rate
        shifts = middle * rate
        table = history_table + sequence.to(tl.int64) * history_table_row
        page_codes = codes + head.to(tl.int64) * tl.multiple_of(codes_head, ALIGN)
        page_parameters = parameters + head.to(tl.int64) * tl.multiple_of(
            parameters_head, PARAMETER_ALIGN
        )
        # Blocks start at multiples of their size: some at the lower border, full ones, the rest.
        start = low // HISTORY_N * HISTORY_N
        inner = tl.cdiv(tl.maximum(sink, t1 - sliding), HISTORY_N) * HISTORY_N
        blocks = tl.maximum(full - inner, 0) // HISTORY_N
        inner = tl.where(blocks > 0, inner, start)
        outer = inner + blocks * HISTORY_N
        before = (inner - start) // HISTORY_N
        after = tl.cdiv(tl.maximum(high - outer, 0), HISTORY_N)
        for i in tl.range(0, bound(before + after), num_stages=1):
            j = tl.where(i < before, start + i * HISTORY_N, outer + (i - before) * HISTORY_N)
            j += tl.arange(0, HISTORY_N)
            ok = (j >= low) & (j < high)
            maximum, total, acc = _attend_history(
                j, ok, t, queries, rates, shifts, maximum, total, acc,
                page_codes, page_parameters, table, codes_page, parameters_page,
                history_table_column, cap, recent, sliding, ALIGN, PARAMETER_ALIGN, PAGE,
                VALUE_START, KEY_PARAMETERS, VALUE_PARAMETERS, KEY_BITS, VALUE_BITS, COLUMNS,
                HEAD_DIM, GROUPS, FORMAT, CAPPED, True, ASM,
            )  # fmt: skip
        for first_key in tl.range(bound(inner), bound(outer), HISTORY_N, num_stages=HISTORY_STAGES):
            j = first_key + tl.arange(0, HISTORY_N)
            maximum, total, acc = _attend_history(
                j, j >= 0, t, queries, rates, shifts, maximum, total, acc,
                page_codes, page_parameters, table, codes_page, parameters_page,
                history_table_column, cap, recent, sliding, ALIGN, PARAMETER_ALIGN, PAGE,
                VALUE_START, KEY_PARAMETERS, VALUE_PARAMETERS, KEY_BITS, VALUE_BITS, COLUMNS,
                HEAD_DIM, GROUPS, FORMAT, CAPPED, False, ASM,
            )  # fmt: skip
        acc = back_transformed(
            acc, total, value_matrix + square, value_matrix + rest + square,
            value_mean + head * HEAD_DIM, HEAD_DIM, COLUMNS, SLICE, FOLDED, VALUE_MEAN,
        )  # fmt: skip

    # ptxas runs all products one by one (C7515) unless the accumulator is computed here once more.
    acc *= tl.where(sink >= 0, 1.0, 0.0)

    # -- exact keys: the sink; those after t - recent; and all of the chunk unless strict ----------
    queries = tl.load(rows[:, None] + channel[None, :], mask=real[:, None] & in_head, other=0.0)
    rates = tl.full([BLOCK_M], 1.0, tl.float32) * rate
    shifts = tl.zeros([BLOCK_M], tl.float32)
    own_k = k + chunk.to(tl.int64) * k_token + head.to(INDEX) * k_head + channel[None, :]
    own_v = v + chunk.to(tl.int64) * v_token + head.to(INDEX) * v_head + channel[None, :]
    stored = window + head.to(tl.int64) * window_head + channel[None, :] * window_channel
    table = window_table + sequence.to(tl.int64) * window_table_row
    exact_from = t1  # from here on, the rule does not matter
    if not STRICT:
        exact_from = begin
    # Ranges: the sink; keys with a border before the full blocks; these; the rest to the diagonal.
    sink_low = tl.maximum(0, t0 - sliding + 1)
    sink_blocks = tl.cdiv(tl.maximum(tl.minimum(sink, t1) - sink_low, 0), EXACT_N)
    low = tl.maximum(sink, t0 - sliding + 1)
    low = tl.maximum(low, tl.minimum(exact_from, t0 - recent + 1))
    inner = tl.maximum(tl.maximum(low, begin), t1 - sliding)
    inner = tl.maximum(inner, tl.minimum(exact_from, t1 - recent))
    blocks = tl.maximum(t0 + 1 - inner, 0) // EXACT_N
    inner = tl.where(blocks > 0, inner, low)
    outer = inner + blocks * EXACT_N
    before = tl.cdiv(inner - low, EXACT_N)
    after = tl.cdiv(tl.maximum(t1 - outer, 0), EXACT_N)
    for first_key in tl.range(bound(inner), bound(outer), EXACT_N, num_stages=EXACT_STAGES):
        j = (first_key - begin + tl.arange(0, EXACT_N)[:, None]).to(INDEX)
        if HEAD_DIM == COLUMNS:
            keys = tl.load(own_k + j * k_token)
            values = tl.load(own_v + j * v_token)
        else:
            keys = tl.load(own_k + j * k_token, mask=in_head, other=0.0)
            values = tl.load(own_v + j * v_token, mask=in_head, other=0.0)
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        maximum, total, acc = attend(
            queries, keys, values, rates, shifts, True, maximum, total, acc, cap, CAPPED, False, ASM
        )
    for i in tl.range(0, bound(sink_blocks + before + after), num_stages=1):
        start = outer + (i - sink_blocks - before) * EXACT_N
        end = t1
        if i < sink_blocks + before:
            start = low + (i - sink_blocks) * EXACT_N
            end = inner
        if i < sink_blocks:
            start = sink_low + i * EXACT_N
            end = tl.minimum(sink, t1)
        j = start + tl.arange(0, EXACT_N)
        own = ((j >= begin) & (j < end))[:, None] & in_head
        before_chunk = (j < begin) & (j < end)
        page = tl.load(table + j // WINDOW_PAGE * window_table_column, mask=before_chunk, other=0)
        at = page.to(tl.int64) * window_page + j % WINDOW_PAGE * window_token
        at = stored + at[:, None]
        other = before_chunk[:, None] & in_head
        own_j = (j - begin)[:, None].to(INDEX)
        own_keys = tl.load(own_k + own_j * k_token, mask=own, other=0.0).to(queries.dtype)
        own_values = tl.load(own_v + own_j * v_token, mask=own, other=0.0).to(queries.dtype)
        kept_keys = tl.load(at, mask=other, other=0.0).to(queries.dtype)
        kept_values = tl.load(at + window_side, mask=other, other=0.0).to(queries.dtype)
        age = t[:, None] - j[None, :]
        exact = (j < sink) | (j >= exact_from)
        seen = (j < end)[None, :] & (age >= 0) & (age < sliding)
        seen = seen & (exact[None, :] | (age < recent))
        keys = tl.where(own, own_keys, kept_keys)
        values = tl.where(own, own_values, kept_values)
        maximum, total, acc = attend(
            queries, keys, values, rates, shifts, seen, maximum, total, acc, cap, CAPPED, True, ASM
        )

    result = acc / tl.where(real, total, 1.0)[:, None]
    at = out + row_token[:, None] * out_token + row_head[:, None] * out_head
    at += channel[None, :] * out_channel
    tl.store(at, result.to(out.dtype.element_ty), mask=real[:, None] & in_head)
