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

Here: the tunables and the launch. The kernel is in prefill_kernel.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM, PageLayout, RowLayout
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.kernels.rows import bases
from oscarkv.kernels.triton.prefill_history import LOG_SHIFT, column_channels
from oscarkv.kernels.triton.prefill_kernel import prefill_kernel


@dataclass(frozen=True)
class Tiles:
    """The tunables of one head_dim, rounded up to a power of two."""

    block_m: int  # query rows of a program; fewer where all chunks are short
    history_n: int  # history tokens of a step
    exact_n: int  # exact tokens of a step
    warps: int
    history_stages: int = 5  # a page table is read first: 5 keep two steps in flight, 3 one
    exact_stages: int = 2
    slice: int = 256  # rows of B^-1 that one step of acc B^-1 takes, at most


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
#: Query rows of a program where no chunk has more.
SHORT_ROWS = 16
#: Channels of q that one step of q A^-T takes.
TRANSFORM_BLOCK = 64
#: Bytes of shared memory with which tiles are used as they are. An H100 has 227 KiB, an A100 163,
#: most others 99.
ENOUGH_SHARED = 200 * 1024
#: Where there are fewer: numbers of B^-1 in a slice, and of fp32 queries in a program.
SMALL_SLICE = 16 * 1024
SMALL_QUERIES = 4 * 1024

_FAR = 1 << 30  # further than any position
_PARAMETER_TYPES = {"fp16": torch.int32, "log8": torch.int16, "log8-symmetric": torch.uint8}


def prefill(plan: Plan, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
    """Attention of the planned chunks: q [tokens, query heads, d], k and v [tokens, H, d]."""
    if not plan.max_query_len or not q.shape[0]:
        return
    heads, dim, layout = layer.kv_heads, q.shape[-1], layer.layout
    group = q.shape[1] // heads
    columns = triton.next_power_of_2(dim)
    shared = shared_memory(q.device)
    tiles = _tiles(columns, q.dtype, plan.max_query_len * group, layout, shared)
    transforms = layer.transforms
    query_matrix, value_matrix = _matrices(layer, columns)
    key_mean, value_mean = transforms.key_mean.contiguous(), transforms.value_mean
    codes = layer.history.view(torch.int16)
    parameters = layer.history.view(_parameter_type(layout))
    starts = layout.offsets
    window = layer.window
    rate = layer.scale / math.log(2)
    if layer.soft_cap is not None:
        rate *= 2 / layer.soft_cap
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    grid = (triton.cdiv(plan.max_query_len * group, tiles.block_m), heads, plan.seq_lens.shape[0])
    prefill_kernel[grid](
        q, k, v, out, codes, parameters, window, query_matrix, value_matrix, key_mean,
        key_mean if value_mean is None else value_mean.contiguous(),
        plan.seq_lens, plan.query_start_loc, plan.history_table, plan.window_table,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), out.stride(2),
        codes.stride(0), codes.stride(1), parameters.stride(0), parameters.stride(1),
        window.stride(0), window.stride(1), window.stride(2), window.stride(3), window.stride(4),
        plan.history_table.stride(0), plan.history_table.stride(1),
        plan.window_table.stride(0), plan.window_table.stride(1),
        rate, (layer.soft_cap or 0.0) / math.log(2), layer.sink, layer.recent,
        _FAR if layer.sliding_window is None else layer.sliding_window,
        GROUP=group, HEAD_DIM=dim, COLUMNS=columns, PAGE=layout.page_size,
        WINDOW_PAGE=PAGE_QUANTUM, KEY_BITS=layout.key_bits, VALUE_BITS=layout.value_bits,
        GROUPS=layout.groups, FORMAT=layout.parameter_format, VALUE_START=starts[1] // 2,
        KEY_PARAMETERS=starts[2] // parameters.element_size(),
        VALUE_PARAMETERS=starts[3] // parameters.element_size(),
        ALIGN=_alignment(codes), PARAMETER_ALIGN=_alignment(parameters),
        STRICT=plan.strict, CAPPED=layer.soft_cap is not None,
        FOLDED=transforms.value_inverse is None, VALUE_MEAN=value_mean is not None,
        EXACT_QUERIES=q.dtype == torch.bfloat16,
        ASM=USE_ASM and q.is_cuda and torch.version.hip is None,
        BLOCK_M=tiles.block_m, HISTORY_N=tiles.history_n, EXACT_N=tiles.exact_n,
        TRANSFORM_N=min(TRANSFORM_BLOCK, columns), SLICE=min(tiles.slice, columns),
        INDEX=_index_type(q, k, v, out), HISTORY_STAGES=tiles.history_stages,
        EXACT_STAGES=tiles.exact_stages, num_warps=tiles.warps,
    )  # fmt: skip


def _parameter_type(layout: PageLayout) -> torch.dtype:
    """What one load takes: a group's parameters; or both groups', since a GPU cannot fetch single
    bytes ahead of their use."""
    halves = all(
        row.bits != 3 and layout.head_dim == 2 * row.planes[0].slots * row.planes[0].words
        for row in (layout.key_row, layout.value_row)
    )
    if layout.parameter_format == "log8-symmetric" and layout.groups == 2 and halves:
        return torch.int16
    return _PARAMETER_TYPES[layout.parameter_format]


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return ENOUGH_SHARED  # the interpreter: no limit
    properties = torch.cuda.get_device_properties(device)
    # AMD's have no opt-in.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def _tiles(columns: int, dtype: torch.dtype, rows: int, layout: PageLayout, shared: int) -> Tiles:
    """The tunables for this geometry; fewer rows for the shortest chunks, which fill no tile.

    Not for any in between: each would be compiled, when a server first meets it.
    """
    wide = dtype == torch.float32
    tiles = WIDE_TILES[columns > 128] if wide else TILES[columns]
    if shared < ENOUGH_SHARED:
        tiles = replace(tiles, slice=SMALL_SLICE // columns)
        if wide:
            tiles = replace(tiles, block_m=min(tiles.block_m, SMALL_QUERIES // columns))
    size = layout.head_dim // layout.groups
    for row in (layout.key_row, layout.value_row):
        if row.bits == 3 or (layout.groups > 1 and size % (2 * row.planes[0].words)):
            # Something is gathered for each column: too much for buffers in shared memory.
            tiles = replace(tiles, history_stages=1)
    if rows > SHORT_ROWS:
        return tiles
    return replace(tiles, block_m=SHORT_ROWS, warps=min(tiles.warps, 4))


def _index_type(*tensors: Tensor) -> tl.dtype:
    """Of tokens and heads that are multiplied by a stride: int64 only where int32 would wrap."""
    last = max(x.shape[axis] * x.stride(axis) for x in tensors for axis in (0, 1))
    return tl.int64 if last >= 2**31 else tl.int32


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
