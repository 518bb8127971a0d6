"""Host side of decode.cu: which variant, what it needs, and its launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.kernels.cuda.launch import load, refuse_capture, variant
from oscarkv.kernels.cuda.packed import (
    HADAMARD_HEAD_DIMS,
    PARAMETER_CODES,
    PackedFormat,
    format_of,
    unsupported_format,
)
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.plan import Plan
from oscarkv.linalg import hadamard

#: Chunks of this many bytes and more make good use of memory; a ring holds a few of them.
CHUNK_BYTES = 4096
#: Tiles that a warp works on at a time, so that one's arithmetic fills the other's waits: more
#: where there are few query rows to hold and a tile has much to do.
TILES_AT_ONCE, WIDE_TILES_AT_ONCE = 2, 4
#: Query rows that a block of oscar_queries transforms.
QUERY_ROWS = 8
#: Parts that a block works on, about, where lengths differ.
WAVES = 4
#: What each block loses of its processor's shared memory.
RESERVED = 1024
#: How far an inverse may be from Sylvester's matrix to be it: float's own rounding, about.
HADAMARD_ERROR = 1e-7
#: "No limit", for windows and lengths: half of int32, so that differences do not overflow.
UNLIMITED = 1 << 30
_POINTERS = (
    "q out history window seq_lens query_start history_table window_table schedule arrivals "
    "tickets partial queries query_matrix key_mean value_inverse value_mean exponents"
).split()
_STRIDES = (
    "q_token q_head out_token out_head history_page history_head window_page window_head"
).split()
_INTEGERS = (
    "history_columns window_columns batch kv_heads group row_blocks sink recent sliding"
).split()


class Arguments(ctypes.Structure):
    """`Arguments` of decode.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("one", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Geometry(PackedFormat):
    """What a variant of the kernel is compiled for."""

    row_groups: int
    soft_cap: bool
    value_hadamard: bool  # what undoes the values' transform is Sylvester's matrix
    shared_memory: int = 228 * 1024  # of a processor; that of sm_90

    @classmethod
    def of(cls, q: Tensor, layer: LayerCache, max_query_len: int) -> Geometry:
        rows = q.shape[1] // layer.kv_heads * max_query_len
        most = 2 if layer.layout.head_dim > 128 else 4
        row_groups = next((n for n in (1, 2) if 4 * n >= rows), most)
        return cls(
            *format_of(q, layer),
            row_groups,
            layer.soft_cap is not None,
            _value_hadamard(layer),
            torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor,
        )

    @property
    def warps(self) -> int:
        """Of a block: two blocks of 8 on a processor; wide heads need more registers for each."""
        return 12 if self.head_dim > 128 and self.row_groups == 1 else 8

    @property
    def rows(self) -> int:
        return 4 * self.row_groups

    @property
    def tile_bytes(self) -> int:
        """Packed bytes of 16 tokens."""
        parameters = self.groups * (4, 2, 1)[PARAMETER_CODES[self.parameters]]
        codes = self.head_dim * (self.key_bits + self.value_bits) // 8
        return 16 * (codes + 2 * parameters)

    @property
    def chunk(self) -> int:
        """Tiles that a warp fetches at a time: 4 KB and more, if two chunks a warp fit."""
        tiles = 1
        while tiles < 4 and tiles * self.tile_bytes < CHUNK_BYTES:
            tiles *= 2
        while tiles > 1 and self._stages_of(tiles) < 2:
            tiles //= 2
        return tiles

    @property
    def paired(self) -> bool:
        """Two groups with a scale each and no offset: what is known of a token fits two floats."""
        return self.groups == 2 and self.parameters == "log8-symmetric"

    @property
    def tiles_at_once(self) -> int:
        """More groups or rows have more to hold."""
        if self.row_groups > (1 if self.paired else 2) or (self.groups > 1 and not self.paired):
            return 1
        wide = self.head_dim > 64 and self.row_groups == 1
        return min(WIDE_TILES_AT_ONCE if wide else TILES_AT_ONCE, self.chunk)

    @property
    def stages(self) -> int:
        return max(2, min(4, self._stages_of(self.chunk)))

    def _stages_of(self, chunk: int) -> int:
        """How many chunks of that size each warp has room for."""
        room = self.shared_memory // self.blocks_per_sm - RESERVED - self._fixed_bytes(chunk)
        return room // (self.warps * chunk * self.tile_bytes)

    def _fixed_bytes(self, chunk: int) -> int:
        """Of `Shared`, all but its working space."""
        rows, stride = self.rows, 4 * (self.head_dim + 8)
        stats = 4 * self.warps * rows * (2 + self.groups) + 4 * rows * (4 + self.groups)
        queries = (self.row_groups + 1) // 2 * -(-self.head_dim // 32) * 512
        staged = self.groups == 1 or self.paired
        grids = 8 * self.warps * 2 * chunk * 16 if staged else 16 * self.warps
        return 2 * rows * stride + queries + stats + grids + 4 * (4 + 11 * 64) + 256

    @property
    def shared_bytes(self) -> int:
        """At least `sizeof(Shared)` of decode.cu, which checks it."""
        ring = self.warps * self.stages * self.chunk * self.tile_bytes
        merge = self.warps * self.rows * 4 * (self.head_dim + 8)
        product = 16 * min(self.rows, 8) * 32 * self.warps
        return max(ring, merge, product) + self._fixed_bytes(self.chunk)

    @property
    def prepared_words(self) -> int:
        """`PreparedQueries` of decode.cu, in words of 4 bytes."""
        words = self.head_dim // 16
        parts = 4 if words <= 4 else 8 if words <= 8 else 16
        return self.row_groups * parts * 32 + self.rows * (2 + self.groups)

    @property
    def blocks_per_sm(self) -> int:
        """As many as registers allow: 128 a thread; up to 255 where there is more to hold."""
        return 2 if self.head_dim <= 128 and self.row_groups <= 2 else 1

    def macros(self) -> dict[str, int]:
        return {
            **super().macros(),
            "ROW_GROUPS": self.row_groups,
            "CHUNK": self.chunk,
            "STAGES": self.stages,
            "WARPS": self.warps,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "SOFT_CAP": int(self.soft_cap),
            "VALUE_HADAMARD": int(self.value_hadamard),
            "QUERY_ROWS": QUERY_ROWS,
            "TILES_AT_ONCE": self.tiles_at_once,
            "WAVES": WAVES,
            "SHARED_BYTES": self.shared_bytes,
            "PREPARED_BYTES": 4 * self.prepared_words,
        }


class DecodeKernel:
    """One variant on one device, with the memory it works in.

    Memory is made when a larger batch than ever before comes, so a graph is captured after one
    plain run of its batch size, and dies with the memory it was captured with: see `reserve`.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._schedule_kernel, self._queries_kernel, self._few_kernel, self._decode_kernel = load(
            "decode.cu",
            (
                ("oscar_schedule", 0),
                ("oscar_queries", 0),
                ("oscar_few_queries", 0),
                ("oscar_decode", geometry.shared_bytes),
            ),
            variant(geometry.macros()),
            index,
        )
        self.blocks = _processors(device) * geometry.blocks_per_sm
        record = 2 * geometry.rows * (geometry.head_dim + 2)
        parts = 2 * WAVES * self.blocks  # of lines with several: each is at least half as large
        self._partial = torch.empty(parts * record, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self._queries = torch.empty(0, dtype=torch.int32, device=device)
        self._schedule = torch.empty(0, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=device)
        self._blocks_argument = ctypes.c_int32(self.blocks)

    def arguments(self, plan: Plan, layer: LayerCache, query_heads: int) -> Arguments:
        """What stays the same from step to step, for one layer."""
        group = query_heads // layer.kv_heads
        transforms, history, window = layer.transforms, layer.history, layer.window
        return Arguments(
            tickets=self._tickets.data_ptr(),
            partial=self._partial.data_ptr(),
            query_matrix=transforms.query.data_ptr(),
            key_mean=transforms.key_mean.data_ptr(),
            value_inverse=_pointer(transforms.value_inverse),
            value_mean=_pointer(transforms.value_mean),
            exponents=transforms.exponents.data_ptr(),
            history_page=history.stride(0),
            history_head=history.stride(1),
            window_page=window.stride(0),
            window_head=window.stride(1),
            kv_heads=layer.kv_heads,
            group=group,
            row_blocks=-(-group * plan.max_query_len // self.geometry.rows),
            sink=layer.sink,
            recent=min(layer.recent, UNLIMITED),
            sliding=layer.sliding_window or UNLIMITED,
            one=1,
        )

    def renew(self, arguments: Arguments, plan: Plan, layer: LayerCache, sequences: int) -> None:
        """What a step brings, all but q and out; memory for that many sequences."""
        batch = plan.seq_lens.shape[0]
        most = max(batch, sequences)
        self._reserve(most, most * arguments.kv_heads * arguments.row_blocks)
        arguments.history = layer.history.data_ptr()
        arguments.window = layer.window.data_ptr()
        arguments.seq_lens = plan.seq_lens.data_ptr()
        arguments.query_start = plan.query_start_loc.data_ptr()
        arguments.history_table = plan.history_table.data_ptr()
        arguments.window_table = plan.window_table.data_ptr()
        arguments.history_columns = plan.history_table.stride(0)
        arguments.window_columns = plan.window_table.stride(0)
        arguments.schedule = self._schedule.data_ptr()
        arguments.arrivals = self._arrivals.data_ptr()
        arguments.queries = self._queries.data_ptr()
        arguments.batch = batch
        arguments.scale = layer.scale
        arguments.soft_cap = layer.soft_cap or 0.0

    def plan(self, arguments: Arguments) -> None:
        """Share out the step's work; once for all layers that agree in `arguments`' numbers."""
        self._schedule_kernel.launch((1, 1, 1), 256, arguments, self._blocks_argument)

    def run(self, arguments: Arguments, q: Tensor, out: Tensor) -> None:
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.q_token, arguments.q_head = q.stride(0), q.stride(1)
        arguments.out_token, arguments.out_head = out.stride(0), out.stride(1)
        threads = 32 * self.geometry.warps
        rows = arguments.batch * arguments.row_blocks * self.geometry.rows
        queries = self._few_kernel if rows <= QUERY_ROWS // 2 else self._queries_kernel
        grid = arguments.kv_heads, -(-rows // QUERY_ROWS), 1
        queries.launch(grid, 32 * QUERY_ROWS, arguments, early=True)
        self._decode_kernel.launch((self.blocks, 1, 1), threads, arguments, early=True)

    def _reserve(self, batch: int, pairs: int) -> None:
        size = 4 + 11 * batch  # `Schedule` of decode.cu
        if self._schedule.numel() >= size and self._arrivals.numel() >= pairs:
            return
        refuse_capture()
        if self._schedule.numel() < size:
            self._schedule = torch.empty(size, dtype=torch.int32, device=self.device)
        if self._arrivals.numel() < pairs:
            self._arrivals = torch.zeros(pairs, dtype=torch.int32, device=self.device)
            size = pairs * self.geometry.prepared_words
            self._queries = torch.empty(size, dtype=torch.int32, device=self.device)


def _value_hadamard(layer: LayerCache) -> bool:
    """Whether values are stored times Sylvester's matrix, which is its own inverse: it needs no
    reading."""
    inverse, dim = layer.transforms.value_inverse, layer.layout.head_dim
    if inverse is None or dim not in HADAMARD_HEAD_DIMS:
        return False
    if "cuda_value_hadamard" not in layer.memo:  # looks at the numbers: that waits for the device
        refuse_capture()
        away = inverse - hadamard(dim).to(inverse)
        layer.memo["cuda_value_hadamard"] = (away.abs().amax() <= HADAMARD_ERROR).cpu()
    return bool(layer.memo["cuda_value_hadamard"])


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def aligned(q: Tensor) -> bool:
    return q.data_ptr() % 4 == 0


def unsupported(q: Tensor, out: Tensor, layer: LayerCache) -> str | None:
    """Why the kernel does not take this layer, or None."""
    reason = unsupported_format(q, layer)
    if reason is None and (q.stride(-1) != 1 or out.stride(-1) != 1 or q.dtype != out.dtype):
        reason = "queries or outputs of another layout"
    if reason is None and (not aligned(q) or q.stride(0) % 2 or q.stride(1) % 2):
        reason = "queries that are not aligned to 4 bytes"
    return reason
