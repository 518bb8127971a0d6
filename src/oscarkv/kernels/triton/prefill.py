"""Attention of a chunk over the packed history, the exact windows and the chunk itself.

One program takes BLOCK_M query rows of one KV head of one sequence. The query heads of a KV head
lie side by side (row = token * heads + head), so any GQA ratio fills the tile. It goes through the
keys once, with one running maximum, one sum and one accumulator:

    q' = q A^-T                             in registers, fp16, each row times a power of two
    for blocks of the history:              logits q' k' + q m_K,  acc += p v'      (fp16 tiles)
    acc = acc B^-1 + l m_V                  l: the sum of p so far; rescaling stays linear
    for blocks of exact keys:               logits q k,            acc += p v
    out = acc / l

    positions   0 ..... sink ........................ t - recent ......... chunk ..... t
    read from   [ exact ]    [  history, packed     ]            [ exact                ]

Blocks in which every row reads every key run in loops without masks; the few at the borders
(`strict` or not, sliding window or not) in a loop that knows the whole rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM, PageLayout, RowLayout
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.rows import bases
from oscarkv.kernels.triton.portable import bound, dot
from oscarkv.kernels.triton.prefill_history import LOG_SHIFT, column_channels, history_tile


@dataclass(frozen=True)
class Tiles:
    """The tunables of one head_dim, rounded up to a power of two."""

    block_m: int  # query rows of a program, at most; fewer where the chunks are short
    history_n: int  # history tokens of a step
    exact_n: int  # exact tokens of a step
    warps: int
    history_stages: int = 5  # a page table is read first: 5 keep two steps in flight, 3 one
    exact_stages: int = 2
    registers: int | None = None  # of a thread, at most


#: For 16-bit queries.
TILES = {
    16: Tiles(128, 128, 64, 8),
    32: Tiles(128, 128, 64, 8),
    64: Tiles(128, 128, 64, 8),
    128: Tiles(64, 128, 64, 4),
    256: Tiles(64, 64, 32, 8),
}
#: For fp32 queries, whose exact tiles are twice as large: up to 128 columns, and above.
WIDE_TILES = Tiles(64, 32, 32, 4, exact_stages=1), Tiles(64, 32, 16, 8, exact_stages=1)
#: Unpack with inline assembly where there is an NVIDIA GPU.
USE_ASM = True
#: Channels of q that one step of q A^-T takes.
TRANSFORM_BLOCK = 64

_FAR = 1 << 30  # further than any position
_PARAMETER_TYPES = {"fp16": torch.int32, "log8": torch.int16, "log8-symmetric": torch.uint8}
_LOWEST = tl.constexpr(-1e30)  # of the running maximum: finite, so that differences are no NaN
_HEADROOM = tl.constexpr(12.0)  # weights are p 2^12: more of them are normal fp16 numbers


# -- host ----------------------------------------------------------------------------------------


def prefill(plan: Plan, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
    """Attention of the planned chunks: q [tokens, query heads, d], k and v [tokens, H, d]."""
    if not plan.max_query_len or not q.shape[0]:
        return
    heads, dim, layout = layer.kv_heads, q.shape[-1], layer.layout
    group = q.shape[1] // heads
    columns = triton.next_power_of_2(dim)
    tiles = _tiles(columns, q.dtype, plan.max_query_len * group, layout)
    transforms = layer.transforms
    query_matrix, value_matrix = _matrices(layer, columns)
    key_mean, value_mean = transforms.key_mean.contiguous(), transforms.value_mean
    codes = layer.history.view(torch.int16)
    parameters = layer.history.view(_PARAMETER_TYPES[layout.parameter_format])
    starts = layout.offsets
    window = layer.window
    capped = layer.soft_cap is not None
    rate = layer.scale / math.log(2)
    if layer.soft_cap is not None:
        rate *= 2 / layer.soft_cap
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    grid = (triton.cdiv(plan.max_query_len * group, tiles.block_m), heads, plan.seq_lens.shape[0])
    _prefill_kernel[grid](
        q,
        k,
        v,
        out,
        codes,
        parameters,
        window,
        query_matrix,
        value_matrix,
        key_mean,
        key_mean if value_mean is None else value_mean.contiguous(),
        plan.seq_lens,
        plan.query_start_loc,
        plan.history_table,
        plan.window_table,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        codes.stride(0),
        codes.stride(1),
        parameters.stride(0),
        parameters.stride(1),
        window.stride(0),
        window.stride(1),
        window.stride(2),
        window.stride(3),
        window.stride(4),
        plan.history_table.stride(0),
        plan.history_table.stride(1),
        plan.window_table.stride(0),
        plan.window_table.stride(1),
        rate,
        (layer.soft_cap or 0.0) / math.log(2),
        layer.sink,
        layer.recent,
        _FAR if layer.sliding_window is None else layer.sliding_window,
        GROUP=group,
        HEAD_DIM=dim,
        COLUMNS=columns,
        PAGE=layout.page_size,
        WINDOW_PAGE=PAGE_QUANTUM,
        KEY_BITS=layout.key_bits,
        VALUE_BITS=layout.value_bits,
        GROUPS=layout.groups,
        FORMAT=layout.parameter_format,
        VALUE_START=starts[1] // 2,
        KEY_PARAMETERS=starts[2] // parameters.element_size(),
        VALUE_PARAMETERS=starts[3] // parameters.element_size(),
        ALIGN=_alignment(codes),
        PARAMETER_ALIGN=_alignment(parameters),
        STRICT=plan.strict,
        CAPPED=capped,
        FOLDED=transforms.value_inverse is None,
        VALUE_MEAN=value_mean is not None,
        EXACT_QUERIES=q.dtype == torch.bfloat16,
        ASM=USE_ASM and q.is_cuda and torch.version.hip is None,
        BLOCK_M=tiles.block_m,
        HISTORY_N=tiles.history_n,
        EXACT_N=tiles.exact_n,
        TRANSFORM_N=min(TRANSFORM_BLOCK, columns),
        HISTORY_STAGES=tiles.history_stages,
        EXACT_STAGES=tiles.exact_stages,
        num_warps=tiles.warps,
        **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
    )


def _tiles(columns: int, dtype: torch.dtype, rows: int, layout: PageLayout) -> Tiles:
    """The tunables for this geometry, with no more rows than the longest chunk fills."""
    tiles = WIDE_TILES[columns > 128] if dtype == torch.float32 else TILES[columns]
    size = layout.head_dim // layout.groups
    for row in (layout.key_row, layout.value_row):
        if row.bits == 3 or (layout.groups > 1 and size % (2 * row.planes[0].words)):
            # Something is gathered for each column: too much for buffers in shared memory.
            tiles = replace(tiles, history_stages=1)
    needed = max(16, triton.next_power_of_2(rows))
    if needed >= tiles.block_m:
        return tiles
    return replace(tiles, block_m=needed, warps=min(tiles.warps, 4))


def _alignment(pages: Tensor) -> int:
    """A power of two that divides the strides of pages and heads and the first address."""
    size = pages.element_size()
    return math.gcd(pages.stride(0), pages.stride(1), pages.data_ptr() // size, 16)


def _matrices(layer: LayerCache, columns: int) -> tuple[Tensor, Tensor]:
    """A^-1 and B^-1 with their rows in the order of the tiles' columns, padded with zeros.

    bf16 [2, H, columns, columns]: the rounded matrix and what rounding left over.
    """
    if "prefill_query" not in layer.memo:
        transforms, layout = layer.transforms, layer.layout
        inverse = transforms.value_inverse
        if inverse is None:
            inverse = torch.eye(layout.head_dim, device=layer.history.device)
            inverse = inverse.expand(layer.kv_heads, -1, -1)
        unit = torch.ones_like(bases(layer))
        if layout.parameter_format != "fp16":
            unit = bases(layer) * 2.0**LOG_SHIFT
        query = transforms.query.float() * unit[0, :, None, None]
        inverse = inverse.float() * unit[1, :, None, None]
        query = _in_columns(query.mT, layout.key_row, columns)
        layer.memo["prefill_query"] = _split(query)
        layer.memo["prefill_value"] = _split(_in_columns(inverse, layout.value_row, columns))
    return layer.memo["prefill_query"], layer.memo["prefill_value"]


def _in_columns(matrix: Tensor, row: RowLayout, columns: int) -> Tensor:
    """[H, d, d] -> [H, columns, columns]: the rows in the order of a tile's columns."""
    channel, real = column_channels(row, columns, matrix.device)
    moved = torch.where(real[:, None], matrix[:, channel], 0.0)
    return torch.nn.functional.pad(moved, (0, columns - matrix.shape[-1]))


def _split(matrix: Tensor) -> Tensor:
    rounded = matrix.bfloat16()
    return torch.stack([rounded, (matrix - rounded.float()).bfloat16()]).contiguous()


# -- device: pieces ------------------------------------------------------------------------------


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    if ASM:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / x
    return result


@triton.jit
def _weigh(
    raw,
    rate,
    shift,
    seen,
    maximum,
    total,
    cap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Raw products [rows, keys] -> the weights, and the running maximum, sum and rescaling.

    A row's logit, as a power of two, is raw * rate + shift, all of it times 2 / cap before a cap.
    """
    if CAPPED:  # tanh x = 1 - 2 / (1 + e^2x), e^2x from here as a power of two
        grown = 1.0 + tl.exp2(raw * rate[:, None] + shift[:, None])
        raw = cap - (2.0 * cap) * _reciprocal(grown, ASM)
    if MASKED:
        raw = tl.where(seen, raw, float("-inf"))
    highest = tl.max(raw, 1)
    if CAPPED:
        highest = tl.maximum(maximum, highest)
        weights = tl.exp2(raw - (highest - _HEADROOM)[:, None])
    else:
        highest = tl.maximum(maximum, highest * rate + shift)
        weights = tl.exp2(raw * rate[:, None] + (shift - highest + _HEADROOM)[:, None])
    fade = tl.exp2(maximum - highest)
    return weights, highest, total * fade + tl.sum(weights, 1), fade


@triton.jit
def _attend(
    queries,
    keys,
    values,
    rate,
    shift,
    seen,
    maximum,
    total,
    acc,
    cap,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """One block of keys and values [n, d]."""
    raw = dot(queries, tl.trans(keys), None)
    weights, maximum, total, fade = _weigh(
        raw, rate, shift, seen, maximum, total, cap, CAPPED, MASKED, ASM
    )
    return maximum, total, dot(weights.to(values.dtype), values, acc * fade[:, None])


@triton.jit
def _history_sides(
    codes,
    parameters,
    table,
    j,
    ok,
    codes_page,
    parameters_page,
    table_column,
    ALIGN: tl.constexpr,
    PARAMETER_ALIGN: tl.constexpr,
    PAGE: tl.constexpr,
    VALUE_START: tl.constexpr,
    KEY_PARAMETERS: tl.constexpr,
    VALUE_PARAMETERS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Keys and values of one head at positions j, still transformed: fp16 [n, COLUMNS] each."""
    if MASKED:
        page = tl.load(table + j // PAGE * table_column, mask=ok, other=0)
    else:
        page = tl.load(table + j // PAGE * table_column)
    keys = history_tile(
        codes,
        parameters,
        page,
        j % PAGE,
        ok,
        codes_page,
        parameters_page,
        ALIGN,
        PARAMETER_ALIGN,
        0,
        KEY_PARAMETERS,
        KEY_BITS,
        COLUMNS,
        HEAD_DIM,
        GROUPS,
        FORMAT,
        MASKED,
        ASM,
    )
    values = history_tile(
        codes,
        parameters,
        page,
        j % PAGE,
        ok,
        codes_page,
        parameters_page,
        ALIGN,
        PARAMETER_ALIGN,
        VALUE_START,
        VALUE_PARAMETERS,
        VALUE_BITS,
        COLUMNS,
        HEAD_DIM,
        GROUPS,
        FORMAT,
        MASKED,
        ASM,
    )
    return keys, values


@triton.jit
def _transformed_queries(
    rows,
    ok,
    matrix,
    rest,
    mean,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
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
def _back_transformed(
    acc,
    total,
    matrix,
    rest,
    mean,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLDED: tl.constexpr,
    VALUE_MEAN: tl.constexpr,
):
    """acc B^-1 + total m_V. FOLDED: the matrix only puts the channels in order."""
    column = tl.arange(0, COLUMNS)
    at = column[:, None] * COLUMNS + column[None, :]
    high = tl.load(matrix + at)
    rounded = acc.to(tl.bfloat16)
    left = (acc - rounded.to(tl.float32)).to(tl.bfloat16)
    result = dot(rounded, high, None)
    result = dot(left, high, result)
    if not FOLDED:
        result = dot(rounded, tl.load(rest + at), result)
    if VALUE_MEAN:
        means = tl.load(mean + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        result += total[:, None] * means[None, :]
    return result


# -- device: the kernel --------------------------------------------------------------------------


@triton.jit
def _prefill_kernel(
    q,
    k,
    v,
    out,
    codes,
    parameters,
    window,
    query_matrix,
    value_matrix,
    key_mean,
    value_mean,
    seq_lens,
    query_start_loc,
    history_table,
    window_table,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    out_channel,
    codes_page,
    codes_head,
    parameters_page,
    parameters_head,
    window_page,
    window_head,
    window_side,
    window_token,
    window_channel,
    history_table_row,
    history_table_column,
    window_table_row,
    window_table_column,
    rate,
    cap,
    sink,
    recent,
    sliding,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUE_START: tl.constexpr,
    KEY_PARAMETERS: tl.constexpr,
    VALUE_PARAMETERS: tl.constexpr,
    ALIGN: tl.constexpr,
    PARAMETER_ALIGN: tl.constexpr,
    STRICT: tl.constexpr,
    CAPPED: tl.constexpr,
    FOLDED: tl.constexpr,
    VALUE_MEAN: tl.constexpr,
    EXACT_QUERIES: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HISTORY_N: tl.constexpr,
    EXACT_N: tl.constexpr,
    TRANSFORM_N: tl.constexpr,
    HISTORY_STAGES: tl.constexpr,
    EXACT_STAGES: tl.constexpr,
):
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
    row_head = head * GROUP + row % GROUP
    rows = q + row_token * q_token + row_head * q_head
    maximum = tl.full([BLOCK_M], _LOWEST, tl.float32)
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
        queries, unit, middle = _transformed_queries(
            rows,
            real,
            query_matrix + square,
            query_matrix + rest + square,
            key_mean + head * HEAD_DIM,
            HEAD_DIM,
            COLUMNS,
            BLOCK_M,
            TRANSFORM_N,
            EXACT_QUERIES,
        )
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
            keys, values = _history_sides(
                page_codes,
                page_parameters,
                table,
                j,
                ok,
                codes_page,
                parameters_page,
                history_table_column,
                ALIGN,
                PARAMETER_ALIGN,
                PAGE,
                VALUE_START,
                KEY_PARAMETERS,
                VALUE_PARAMETERS,
                KEY_BITS,
                VALUE_BITS,
                COLUMNS,
                HEAD_DIM,
                GROUPS,
                FORMAT,
                True,
                ASM,
            )
            age = t[:, None] - j[None, :]
            seen = ok[None, :] & (age >= recent) & (age < sliding)
            maximum, total, acc = _attend(
                queries,
                keys,
                values,
                rates,
                shifts,
                seen,
                maximum,
                total,
                acc,
                cap,
                CAPPED,
                True,
                ASM,
            )
        for first_key in tl.range(bound(inner), bound(outer), HISTORY_N, num_stages=HISTORY_STAGES):
            j = first_key + tl.arange(0, HISTORY_N)
            keys, values = _history_sides(
                page_codes,
                page_parameters,
                table,
                j,
                j >= 0,
                codes_page,
                parameters_page,
                history_table_column,
                ALIGN,
                PARAMETER_ALIGN,
                PAGE,
                VALUE_START,
                KEY_PARAMETERS,
                VALUE_PARAMETERS,
                KEY_BITS,
                VALUE_BITS,
                COLUMNS,
                HEAD_DIM,
                GROUPS,
                FORMAT,
                False,
                ASM,
            )
            maximum, total, acc = _attend(
                queries,
                keys,
                values,
                rates,
                shifts,
                True,
                maximum,
                total,
                acc,
                cap,
                CAPPED,
                False,
                ASM,
            )
        acc = _back_transformed(
            acc,
            total,
            value_matrix + square,
            value_matrix + rest + square,
            value_mean + head * HEAD_DIM,
            HEAD_DIM,
            COLUMNS,
            FOLDED,
            VALUE_MEAN,
        )

    # ptxas runs all products one by one (C7515) unless the accumulator is computed here once more.
    acc *= tl.where(sink >= 0, 1.0, 0.0)

    # -- exact keys: the sink; those after t - recent; and all of the chunk unless strict ----------
    queries = tl.load(rows[:, None] + channel[None, :], mask=real[:, None] & in_head, other=0.0)
    rates = tl.full([BLOCK_M], 1.0, tl.float32) * rate
    shifts = tl.zeros([BLOCK_M], tl.float32)
    own_k = k + chunk.to(tl.int64) * k_token + head * k_head + channel[None, :]
    own_v = v + chunk.to(tl.int64) * v_token + head * v_head + channel[None, :]
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
        j = first_key - begin + tl.arange(0, EXACT_N)[:, None]
        if HEAD_DIM == COLUMNS:
            keys = tl.load(own_k + j * k_token)
            values = tl.load(own_v + j * v_token)
        else:
            keys = tl.load(own_k + j * k_token, mask=in_head, other=0.0)
            values = tl.load(own_v + j * v_token, mask=in_head, other=0.0)
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        maximum, total, acc = _attend(
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
        own_j = (j - begin)[:, None]
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
        maximum, total, acc = _attend(
            queries, keys, values, rates, shifts, seen, maximum, total, acc, cap, CAPPED, True, ASM
        )

    result = acc / tl.where(real, total, 1.0)[:, None]
    at = out + row_token[:, None] * out_token + row_head[:, None] * out_head
    at += channel[None, :] * out_channel
    tl.store(at, result.to(out.dtype.element_ty), mask=real[:, None] & in_head)
