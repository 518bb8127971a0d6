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

Here: the tunables, the kernel's way to its two kinds of programs (decode_windows.py,
decode_history.py), and the launches.
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
from oscarkv.kernels.triton.decode_history import attend_history
from oscarkv.kernels.triton.decode_windows import attend_windows
from oscarkv.kernels.triton.merge import merge
from oscarkv.kernels.triton.parameters import BYTES, FORMATS


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


# -- the kernel ----------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["splits", "history_table_row", "window_table_row"],
    do_not_specialize_on_alignment=["history_table", "window_table", "seq_lens", "query_start"],
)
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
            attend_windows(
                q, rows_at, row_exists, positions, first, length, window_acc + at * DIM,
                maxima + at * (splits + 1), sums + at * (splits + 1),
                window + head * WINDOW_HEAD_STRIDE,
                window_table + sequence.to(tl.int64) * window_table_row, window_table_step,
                scale, soft_cap, DIM, SINK, RECENT, SLIDING, SOFT_CAP, WINDOW_PAGE_STRIDE,
                WINDOW_SIDE_STRIDE, WINDOW_TOKEN_STRIDE, WINDOW_BLOCK,
            )  # fmt: skip
        else:
            attend_history(
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
    limited = small and tuning.registers and torch.version.hip is None  # an option of NVIDIA's
    options = {"maxnreg": tuning.registers} if limited else {}
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
