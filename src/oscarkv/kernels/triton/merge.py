"""The second half of decode: sums over the splits of a sequence -> its attention output.

The history's part is still in the values' own basis: here, once for every output row, it is turned
back, its offsets and the mean of the values are added, and the exact windows' part joins it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.triton import constants
from oscarkv.kernels.triton.portable import bound
from oscarkv.kernels.triton.powers import EMPTY

#: Rows one program merges where there are plenty of rows; one otherwise.
MERGE_ROWS = 4
#: Programs below which rows are merged one by one.
FEW_PROGRAMS = 256
MERGE_WARPS = 4
#: Columns of the history's sums, and numbers of a tile of them, taken at a time.
MERGE_COLUMNS = 32
MERGE_TILE = 4096

_NOTHING = tl.constexpr(-1.0e29)  # exponents below: no sums were stored


@triton.jit
def _split_tops(maxima, at, exists, some, splits):
    """Which of the splits `some` of the history stored sums of a row, and their exponents."""
    there = exists[:, None] & (some < splits)[None, :]
    tops = tl.load(maxima + at[:, None] * (splits + 1) + 1 + some[None, :], mask=there, other=EMPTY)
    return there & (tops > _NOTHING), tops


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["query_start"])
def _merge(
    out, acc, offsets, window_acc, maxima, sums, value_matrix, value_offsets, value_mean,
    query_start, splits, out_token, out_head,
    HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_ROWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ALL_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    count = (tl.load(query_start + sequence + 1) - start) * GROUP_ROWS
    first_row = tl.program_id(0) * ROWS
    if first_row < count:
        rows = first_row + tl.arange(0, ROWS)
        exists = rows < count
        at = ((sequence * HEADS + head) * PADDED_ROWS + rows).to(tl.int64)
        every = tl.arange(0, ALL_SPLITS)
        stats_at = at[:, None] * (splits + 1) + every[None, :]
        known = exists[:, None] & (every <= splits)[None, :]
        tops = tl.load(maxima + stats_at, mask=known, other=EMPTY)
        known &= tops > _NOTHING
        top = tl.max(tops, 1)
        shares = tl.exp2(tops - top[:, None])
        shares *= tl.load(sums + stats_at, mask=known, other=0.0)
        denominator = tl.where(exists, tl.sum(shares, 1), 1.0)
        packed_share = tl.sum(tl.where((every > 0)[None, :], shares, 0.0), 1) / denominator

        WIDTH: tl.constexpr = triton.next_power_of_2(DIM)
        channels = tl.arange(0, WIDTH)
        in_row = channels < DIM
        keep = exists[:, None] & in_row[None, :]
        exact = tl.load(window_acc + at[:, None] * DIM + channels[None, :], mask=keep, other=0.0)
        exact_top = tl.load(maxima + at * (splits + 1), mask=exists, other=EMPTY)
        result = exact * tl.exp2(exact_top - top)[:, None]

        block = tl.arange(0, SPLIT_BLOCK)
        step = tl.arange(0, COLUMN_BLOCK)
        for k in tl.range(0, COLUMNS, COLUMN_BLOCK):
            total = tl.zeros((ROWS, COLUMN_BLOCK), tl.float32)
            for s in tl.range(0, bound(splits), SPLIT_BLOCK):
                some = s + block
                there, split_tops = _split_tops(maxima, at, exists, some, splits)
                weights = tl.exp2(split_tops - top[:, None])
                part = tl.load(
                    acc + ((at * splits)[:, None] + some[None, :])[:, :, None] * COLUMNS + k
                    + step[None, None, :],
                    mask=there[:, :, None],
                    other=0.0,
                )  # fmt: skip
                total += tl.sum(part * weights[:, :, None], 1)
            matrix = tl.load(
                value_matrix + (head * COLUMNS + k + step)[:, None] * DIM + channels[None, :],
                mask=in_row[None, :],
                other=0.0,
            )
            result += tl.sum(total[:, :, None] * matrix[None, :, :], 1)
        for group in tl.static_range(GROUPS):
            total_offset = tl.zeros((ROWS,), tl.float32)
            for s in tl.range(0, bound(splits), SPLIT_BLOCK):
                some = s + block
                there, split_tops = _split_tops(maxima, at, exists, some, splits)
                part = tl.load(
                    offsets + ((at * splits)[:, None] + some[None, :]) * GROUPS + group,
                    mask=there,
                    other=0.0,
                )
                total_offset += tl.sum(part * tl.exp2(split_tops - top[:, None]), 1)
            vector = tl.load(
                value_offsets + (head * GROUPS + group) * DIM + channels, mask=in_row, other=0.0
            )
            result += total_offset[:, None] * vector[None, :]

        mean = tl.load(value_mean + head * DIM + channels, mask=in_row, other=0.0)
        result = result / denominator[:, None] + packed_share[:, None] * mean[None, :]
        out_at = (start + rows // GROUP_ROWS).to(tl.int64) * out_token
        out_at += (head * GROUP_ROWS + rows % GROUP_ROWS) * out_head
        result = result.to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + channels[None, :], result, mask=keep)


def merge(
    plan: Plan,
    layer: LayerCache,
    out: Tensor,
    acc: Tensor,
    offsets: Tensor,
    window_acc: Tensor,
    maxima: Tensor,
    sums: Tensor,
    splits: int,
    padded_rows: int,
    group: int,
) -> None:
    """Bring the sums of `decode` together in `out` [tokens, query heads, d]."""
    layout, heads = layer.layout, layer.kv_heads
    matrix, value_offsets, mean = constants.value_matrices(layer)
    most = plan.max_query_len * group
    plenty = plan.batch * heads * most >= FEW_PROGRAMS * MERGE_ROWS
    rows = MERGE_ROWS if plenty and most >= MERGE_ROWS else 1
    all_splits = int(triton.next_power_of_2(splits + 1))
    _merge[(-(-most // rows), heads, plan.batch)](
        out, acc, offsets, window_acc, maxima, sums, matrix, value_offsets, mean,
        plan.query_start_loc, splits, out.stride(0), out.stride(1),
        HEADS=heads, GROUP_ROWS=group, DIM=layout.head_dim, PADDED_ROWS=padded_rows, ROWS=rows,
        COLUMNS=matrix.shape[1], GROUPS=layout.groups, ALL_SPLITS=all_splits,
        SPLIT_BLOCK=min(all_splits, max(1, MERGE_TILE // (rows * MERGE_COLUMNS))),
        COLUMN_BLOCK=min(MERGE_COLUMNS, matrix.shape[1]), num_warps=MERGE_WARPS,
    )  # fmt: skip
