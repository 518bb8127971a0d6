"""Write: one launch transforms, fits, packs and scatters tokens, and copies them to the windows.

One program takes 16 tokens, one KV head and one side. Its tile of rows has a column for each
(group, channel), both padded to powers of two by zero columns of the matrix (`constants.py`), so
that groups are rows of a reshaped tile. Blocks have one fixed shape: a row gets the same bytes
whether it comes alone or in a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscarkv.codec import parameters as codec_parameters
from oscarkv.codec.encode import OPTIMAL_SCALE, START_FACTORS, RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.rows import bases, encode_tokens
from oscarkv.kernels.triton import constants
from oscarkv.kernels.triton.fit import (
    SECOND_DIGIT,
    SPLIT_SECOND_DIGIT,
    clip_threshold,
    fit_least_squares,
    fit_minmax,
)
from oscarkv.kernels.triton.parameters import BYTES, FORMATS
from oscarkv.kernels.triton.portable import dot

#: Tokens of a program; its warps and stages.
WRITE_TOKENS = 16
WRITE_WARPS = 4
WRITE_STAGES = 2
#: Rows of the matrix taken at a time; divides every head_dim.
WRITE_STEP = 16


@triton.jit
def _pack_plane(
    codes, words, exists, BITS: tl.constexpr, SHIFT: tl.constexpr, DIM: tl.constexpr,
    GROUPS: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Store the b bits of the codes from bit SHIFT on as one plane of words, from `words` on.

    Codes come as [tokens, (group, channel) padded]. Their fields must lie as [tokens, field, word].
    A second digit, from bit SECOND on if there is any, lies in the same word as the first one, so
    that both are shifted together.
    """
    TOKENS: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    W: tl.constexpr = (DIM * BITS + 31) // 32
    WP: tl.constexpr = triton.next_power_of_2(W)
    FIELDS: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = 2**BITS - 1
    BOTH: tl.constexpr = MASK * (2**SECOND + 1) if SECOND else MASK
    fields = (codes >> SHIFT) & BOTH
    if W != WP or FIELDS * W != COLUMNS or COLUMNS != DIM:
        SIZE: tl.constexpr = DIM // GROUPS
        SIZE_P: tl.constexpr = triton.next_power_of_2(SIZE)
        place = tl.arange(0, FIELDS * WP)
        channel = place // WP * W + place % WP
        real = (place % WP < W) & (channel < DIM)
        source = tl.where(real, channel // SIZE * SIZE_P + channel % SIZE, 0)
        source = tl.broadcast_to(source[None, :], (TOKENS, FIELDS * WP))
        fields = tl.where(real[None, :], tl.gather(fields, source, 1), 0)
    field = tl.arange(0, FIELDS)
    shift = 16 * (field % 2) + BITS * (field // 2)
    packed = tl.reshape(fields, (TOKENS, FIELDS, WP)) << shift[None, :, None]
    packed = tl.sum(packed, 1)
    word = tl.arange(0, WP)
    tl.store(words[:, None] + word[None, :], packed, mask=exists[:, None] & (word < W)[None, :])


@triton.jit
def _write_side(
    x_in, matrix, mean, window, history, history_slots, window_slots, base, grid, count,
    token_stride, SIDE: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, FORMAT: tl.constexpr, PARAMETER_BYTES: tl.constexpr,
    LEAST_SQUARES: tl.constexpr, REFINED: tl.constexpr, CLIP: tl.constexpr,
    QUARTERS: tl.constexpr, START_A: tl.constexpr, START_B: tl.constexpr, START_C: tl.constexpr,
    FOLDED: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, CODES_AT: tl.constexpr,
    STORED_AT: tl.constexpr, ROW_BYTES: tl.constexpr, WINDOW_PAGE_STRIDE: tl.constexpr,
    WINDOW_TOKEN_STRIDE: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """16 tokens of one side of one KV head; pointers are those of the head."""
    SIZE: tl.constexpr = DIM // GROUPS
    SIZE_P: tl.constexpr = triton.next_power_of_2(SIZE)
    GP: tl.constexpr = triton.next_power_of_2(GROUPS)
    COLUMNS: tl.constexpr = SIZE_P * GP
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < count
    slot = tl.load(history_slots + token, mask=real, other=-1).to(tl.int64)
    window_slot = tl.load(window_slots + token, mask=real, other=-1).to(tl.int64)
    kept, exact = slot >= 0, window_slot >= 16  # page 0 is never used
    slot, window_slot = tl.where(kept, slot, 0), tl.where(exact, window_slot, 0)
    wanted = kept | exact
    window_at = window + window_slot // 16 * WINDOW_PAGE_STRIDE
    window_at += window_slot % 16 * WINDOW_TOKEN_STRIDE
    row_at = x_in + token.to(tl.int64) * token_stride

    column = tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    x = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in tl.range(0, DIM, STEP):
        raw = tl.load(row_at[:, None] + k + step[None, :], mask=wanted[:, None], other=0.0)
        copied = raw.to(window.dtype.element_ty)
        tl.store(window_at[:, None] + k + step[None, :], copied, mask=exact[:, None])
        if not FOLDED:
            centered = raw.to(tl.float32) - tl.load(mean + k + step)[None, :]
            part = tl.load(matrix + (k + step)[:, None] * COLUMNS + column[None, :])
            x = dot(centered, part, x)
    channel = column // SIZE_P * SIZE + column % SIZE_P
    in_row = (column % SIZE_P < SIZE) & (column // SIZE_P < GROUPS)
    if FOLDED:
        there = wanted[:, None] & in_row[None, :]
        x = tl.load(row_at[:, None] + channel[None, :], mask=there, other=0.0).to(tl.float32)

    # From here on every operation is exact, and a row is a group.
    ROWS: tl.constexpr = TOKENS * GP
    row = tl.arange(0, ROWS)
    row_slot, row_kept = slot, kept
    if GP > 1:
        row_token = tl.program_id(0) * TOKENS + row // GP
        row_slot = tl.load(history_slots + row_token, mask=row_token < count, other=-1).to(tl.int64)
        row_kept = (row_slot >= 0) & (row % GP < GROUPS)
        row_slot = tl.where(row_kept, row_slot, 0)
    stored = history + row_slot // PAGE * PAGE_STRIDE + STORED_AT
    stored += row_slot % PAGE * (GROUPS * PARAMETER_BYTES) + row % GP * PARAMETER_BYTES
    grouped = tl.reshape(x, (ROWS, SIZE_P))
    SPLIT: tl.constexpr = REFINED and GROUPS == 2
    FITTED: tl.constexpr = SIZE * 3 // 4 if REFINED and not SPLIT else SIZE
    in_group = tl.arange(0, SIZE_P) < FITTED
    if LEAST_SQUARES:
        codes = fit_least_squares(
            grouped, in_group, base, grid, stored, row_kept, FITTED, BITS, FORMAT, QUARTERS,
            START_A, START_B, START_C, REFINED and not SPLIT, SPLIT,
        )  # fmt: skip
    else:
        clipped = x
        if CLIP >= 0:
            threshold = clip_threshold(x, in_row, CLIP)
            clipped = tl.minimum(tl.maximum(x, -threshold[:, None]), threshold[:, None])
        codes = fit_minmax(
            grouped, tl.reshape(clipped, (ROWS, SIZE_P)), in_group, base, grid, stored, row_kept,
            SIZE, BITS, FORMAT,
        )  # fmt: skip
    codes = tl.reshape(codes, (TOKENS, COLUMNS))
    at = history + slot // PAGE * PAGE_STRIDE + CODES_AT + slot % PAGE * ROW_BYTES
    words = at.to(tl.pointer_type(tl.int32))
    SECOND: tl.constexpr = (SPLIT_SECOND_DIGIT if SPLIT else SECOND_DIGIT) if REFINED else 0
    if BITS == 3:
        _pack_plane(codes, words, kept, 2, 0, DIM, GROUPS, SECOND)
        _pack_plane(codes, words + (DIM * 2 + 31) // 32, kept, 1, 2, DIM, GROUPS, SECOND)
    else:
        _pack_plane(codes, words, kept, BITS, 0, DIM, GROUPS, SECOND)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["history_slots", "window_slots"],
)
def _write(
    k, v, key_matrix, value_matrix, key_mean, value_mean, history, window, history_slots,
    window_slots, bases, grid, count, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr,
    PARAMETER_BYTES: tl.constexpr, LEAST_SQUARES: tl.constexpr, FOLDED: tl.constexpr,
    REFINED: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_CLIP: tl.constexpr, KEY_QUARTERS: tl.constexpr,
    KEY_A: tl.constexpr, KEY_B: tl.constexpr, KEY_C: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_CLIP: tl.constexpr, VALUE_QUARTERS: tl.constexpr,
    VALUE_A: tl.constexpr, VALUE_B: tl.constexpr, VALUE_C: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    KEY_BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, V_AT: tl.constexpr, KP_AT: tl.constexpr,
    VP_AT: tl.constexpr, WINDOW_PAGE_STRIDE: tl.constexpr, WINDOW_HEAD_STRIDE: tl.constexpr,
    WINDOW_SIDE_STRIDE: tl.constexpr, WINDOW_TOKEN_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)  # times a stride, it can be more than int32 holds
    history += head * HEAD_STRIDE
    window += head * WINDOW_HEAD_STRIDE
    if tl.program_id(2) == 0:
        _write_side(
            k + head * k_head, key_matrix + head * DIM * COLUMNS, key_mean + head * DIM, window,
            history, history_slots, window_slots, tl.load(bases + head), grid, count, k_token,
            0, DIM, GROUPS, KEY_BITS, FORMAT, PARAMETER_BYTES, LEAST_SQUARES, REFINED, KEY_CLIP,
            KEY_QUARTERS, KEY_A, KEY_B, KEY_C, False, PAGE, PAGE_STRIDE, 0, KP_AT, KEY_BYTES,
            WINDOW_PAGE_STRIDE, WINDOW_TOKEN_STRIDE, TOKENS, STEP,
        )  # fmt: skip
    else:
        _write_side(
            v + head * v_head, value_matrix + head * DIM * COLUMNS, value_mean + head * DIM,
            window + WINDOW_SIDE_STRIDE, history, history_slots, window_slots,
            tl.load(bases + HEADS + head), grid, count, v_token,
            1, DIM, GROUPS, VALUE_BITS, FORMAT, PARAMETER_BYTES, LEAST_SQUARES, False, VALUE_CLIP,
            VALUE_QUARTERS, VALUE_A, VALUE_B, VALUE_C, FOLDED, PAGE, PAGE_STRIDE, V_AT, VP_AT,
            VALUE_BYTES, WINDOW_PAGE_STRIDE, WINDOW_TOKEN_STRIDE, TOKENS, STEP,
        )  # fmt: skip


# -- host ----------------------------------------------------------------------------------------


def _starts(codec: RowCodec) -> list[float]:
    """The three starting scales, as the fp32 numbers of the format."""
    factors = torch.tensor(START_FACTORS, dtype=torch.float32)
    return [float(x) for x in factors * OPTIMAL_SCALE[codec.levels]]


def _clip_index(codec: RowCodec, dim: int) -> int:
    return min(int(codec.clip * dim), dim - 1) if codec.clip else -1


def write(
    k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
) -> None:
    """Quantise and store tokens k, v [tokens, H, d]. Slot -1 and window page 0 write nothing."""
    count = k.shape[0]
    if not count:
        return
    if layer.transforms.metric is not None or _digits_apart(layer.key_codec, layer.layout.head_dim):
        _write_by_oracle(k, v, history_slots, window_slots, layer)
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    layout, history, window = layer.layout, layer.history, layer.window
    key_codec, value_codec = layer.key_codec, layer.value_codec
    key_matrix, value_matrix, key_mean, value_mean = constants.write_matrices(layer)
    grid, _ = codec_parameters.log_grid(str(k.device))
    _, v_at, kp_at, vp_at, _ = layout.offsets
    parameter_format = FORMATS[layout.parameter_format]
    key_a, key_b, key_c = _starts(key_codec)
    value_a, value_b, value_c = _starts(value_codec)
    _write[(-(-count // WRITE_TOKENS), layer.kv_heads, 2)](
        k, v, key_matrix, value_matrix, key_mean, value_mean, history, window,
        history_slots.contiguous(), window_slots.contiguous(), bases(layer), grid, count,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=layer.kv_heads, DIM=layout.head_dim, GROUPS=layout.groups, FORMAT=parameter_format,
        PARAMETER_BYTES=BYTES[parameter_format], LEAST_SQUARES=key_codec.fit != "minmax",
        FOLDED=layer.transforms.value is None, REFINED=key_codec.refined,
        KEY_BITS=key_codec.bits, KEY_CLIP=_clip_index(key_codec, layout.head_dim),
        KEY_QUARTERS=int(4 * key_codec.gain), KEY_A=key_a, KEY_B=key_b, KEY_C=key_c,
        VALUE_BITS=value_codec.bits, VALUE_CLIP=_clip_index(value_codec, layout.head_dim),
        VALUE_QUARTERS=int(4 * value_codec.gain), VALUE_A=value_a, VALUE_B=value_b,
        VALUE_C=value_c, PAGE=layout.page_size, PAGE_STRIDE=history.stride(0),
        HEAD_STRIDE=history.stride(1), KEY_BYTES=layout.key_row.bytes,
        VALUE_BYTES=layout.value_row.bytes, V_AT=v_at, KP_AT=kp_at, VP_AT=vp_at,
        WINDOW_PAGE_STRIDE=window.stride(0), WINDOW_HEAD_STRIDE=window.stride(1),
        WINDOW_SIDE_STRIDE=window.stride(2), WINDOW_TOKEN_STRIDE=window.stride(3),
        COLUMNS=key_matrix.shape[-1], TOKENS=WRITE_TOKENS, STEP=WRITE_STEP,
        num_warps=WRITE_WARPS, num_stages=WRITE_STAGES, enable_fp_fusion=False,
    )  # fmt: skip


def _digits_apart(codec: RowCodec, dim: int) -> bool:
    """Whether the two digits of a channel lie in different words: the third bit of 3-bit codes is
    packed 32 channels a word, and a quarter of some heads (80) is no whole number of those."""
    return codec.refined and codec.bits == 3 and dim % 32 != 0


def _write_by_oracle(
    k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
) -> None:
    """Torch encodes, and only its results are scattered: metric rounding, which is coordinate
    descent, and refined keys whose digits lie apart.

    Rows with slot -1 write back what a slot of page 0 holds: that page is never read.
    """
    layout = layer.layout
    packed = encode_tokens(k, v, layer)
    slots = history_slots.clamp_min(0)
    pages, offsets = slots // layout.page_size, slots % layout.page_size
    kept = (history_slots >= 0)[:, None, None]
    for section, rows in zip(layout.sections(layer.history), packed, strict=True):
        section[pages, :, offsets] = torch.where(kept, rows, section[pages, :, offsets])
    slots = window_slots.clamp_min(0)
    pages, offsets = slots // PAGE_QUANTUM, slots % PAGE_QUANTUM
    kept = (window_slots >= PAGE_QUANTUM)[:, None, None, None]
    exact = torch.stack([k, v], 2).to(layer.window.dtype)  # [n, H, 2, d]
    before = layer.window[pages, :, :, offsets]
    layer.window[pages, :, :, offsets] = torch.where(kept, exact, before)
