"""Host side of write.cu: which variant, transforms in the order of its fragments, its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.kernels.cuda.launch import load, refuse_capture, variant
from oscarkv.kernels.cuda.packed import (
    HADAMARD_HEAD_DIMS,
    PackedFormat,
    format_of,
    unsupported_format,
)
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.rows import bases

#: Up to so many tokens, many small warps; from there on, large ones.
FEW_TOKENS = 1024
#: A transform up to this size is held in shared memory, by two blocks at a time.
SHARED_MATRIX_BYTES = 96 * 1024
#: The largest number of a matrix or row becomes 2^13 .. 2^14 before it is split into two float16.
TOP_EXPONENT = 13
_POINTERS = "k v history window history_slots window_slots matrices means scales".split()
_STRIDES = (
    "k_token k_head v_token v_head history_page history_head window_page window_head"
).split()


class Arguments(ctypes.Structure):
    """`Arguments` of write.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        ("tokens", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
    ]


def aligned(k: Tensor, v: Tensor) -> bool:
    return (k.data_ptr() | v.data_ptr()) % 16 == 0


def unsupported(k: Tensor, v: Tensor, layer: LayerCache) -> str | None:
    """Why the kernel does not take this layer and these keys and values, or None."""
    if any(codec.fit != "least-squares" for codec in (layer.key_codec, layer.value_codec)):
        return f"fit {layer.key_codec.fit}"
    if layer.transforms.metric is not None:
        return "metric rounding"
    for x in (k, v):
        reason = unsupported_format(x, layer)
        if reason is not None:
            return reason
        strides = [x.stride(i) for i in range(2) if x.shape[i] > 1]
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(stride % 8 for stride in strides):
            return "rows that do not start at multiples of 16 bytes"
    return None


@dataclass(frozen=True)
class Geometry(PackedFormat):
    """What a variant of the kernel is compiled for."""

    key_gain: int  # quarters
    value_gain: int
    refined: bool  # keys
    folded: bool
    value_signs: bool  # the values' transform has numbers of one size
    many: bool  # tokens

    @classmethod
    def of(cls, k: Tensor, layer: LayerCache) -> Geometry:
        return cls(
            *format_of(k, layer),
            round(4 * layer.key_codec.gain),
            round(4 * layer.value_codec.gain),
            layer.key_codec.refined,
            layer.transforms.value is None,
            _value_signs(layer),
            k.shape[0] > FEW_TOKENS,
        )

    @property
    def token_tiles(self) -> int:
        return 2 if self.many else 1

    @property
    def warps(self) -> int:
        return 8 if self.many else 4

    @property
    def blocks_per_sm(self) -> int:
        """For which registers are kept: 128 a thread, or up to 255."""
        return 2 if self.many and self.head_dim <= 128 else 1

    @property
    def matrix_bytes(self) -> int:
        return 16 * 32 * 2 * _tiles(self.head_dim) * -(-self.head_dim // 32)

    @property
    def shared_bytes(self) -> int:
        return self.matrix_bytes if self.matrix_bytes <= SHARED_MATRIX_BYTES else 0

    def macros(self) -> dict[str, int]:
        return {
            **super().macros(),
            "TOKEN_TILES": self.token_tiles,
            "WARPS": self.warps,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "MATRIX_SHARED": int(self.shared_bytes > 0),
            "KEY_GAIN": self.key_gain,
            "VALUE_GAIN": self.value_gain,
            "REFINED": int(self.refined),
            "FOLDED": int(self.folded),
            "VALUE_SIGNS": int(self.value_signs),
        }


class WriteKernel:
    """One variant on one device."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        index = device.index if device.index is not None else torch.cuda.current_device()
        (self._kernel,) = load(
            "write.cu",
            (("oscar_write", geometry.shared_bytes),),
            variant(geometry.macros()),
            index,
        )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._resident = processors * (2 if geometry.head_dim <= 128 else 1)

    def arguments(self, k: Tensor, v: Tensor, layer: LayerCache) -> Arguments:
        """What stays the same for one layer and tensors of these shapes."""
        matrices, means, scales = _constants(layer)
        history, window = layer.history, layer.window
        return Arguments(
            matrices=matrices.data_ptr(),
            means=means.data_ptr(),
            scales=scales.data_ptr(),
            k_token=k.stride(0),
            k_head=k.stride(1),
            v_token=v.stride(0),
            v_head=v.stride(1),
            history_page=history.stride(0),
            history_head=history.stride(1),
            window_page=window.stride(0),
            window_head=window.stride(1),
            tokens=k.shape[0],
            kv_heads=layer.kv_heads,
        )

    def run(
        self,
        arguments: Arguments,
        k: Tensor,
        v: Tensor,
        history_slots: Tensor,
        window_slots: Tensor,
        layer: LayerCache,
    ) -> None:
        history_slots, window_slots = (x.long().contiguous() for x in (history_slots, window_slots))
        arguments.k, arguments.v = k.data_ptr(), v.data_ptr()
        arguments.history = layer.history.data_ptr()
        arguments.window = layer.window.data_ptr()
        arguments.history_slots = history_slots.data_ptr()
        arguments.window_slots = window_slots.data_ptr()
        grid = self.grid(arguments.tokens, arguments.kv_heads)
        self._kernel.launch(grid, 32 * self.geometry.warps, arguments)

    def grid(self, tokens: int, heads: int) -> tuple[int, int, int]:
        """Not more blocks than are at work at a time, if possible: each fetches its matrix once."""
        step = 8 * self.geometry.token_tiles * self.geometry.warps
        blocks = -(-tokens // step)
        most = max(1, self._resident // (2 * heads))
        each = -(-blocks // most)  # steps of a block
        return -(-blocks // each), heads, 2


# -- constants of a layer --------------------------------------------------------------------------


def _constants(layer: LayerCache) -> tuple[Tensor, Tensor, Tensor]:
    """Fragments of the matrices, means [sides, H, d], scales [2, 2, H]: see write.cu."""
    memo, transforms = layer.memo, layer.transforms
    if "cuda_write_matrices" not in memo:
        sides, means = [_fragments(_stored_columns(layer))], [transforms.key_mean]
        if transforms.value is not None and transforms.value_mean is not None:
            split = _sign_fragments if _value_signs(layer) else _fragments
            sides.append(split(transforms.value))
            means.append(transforms.value_mean)
        scales = torch.ones(2, 2, layer.kv_heads, device=transforms.key.device)
        scales[0, : len(sides)] = torch.stack([unscale for _, unscale in sides])
        scales[1] = bases(layer)
        memo["cuda_write_matrices"] = torch.stack([fragments for fragments, _ in sides])
        memo["cuda_write_means"] = torch.stack(means).float().contiguous()
        memo["cuda_write_scales"] = scales
    return memo["cuda_write_matrices"], memo["cuda_write_means"], memo["cuda_write_scales"]


def _value_signs(layer: LayerCache) -> bool:
    """Whether all numbers of a head's value transform are of one size, as a Hadamard matrix's."""
    value = layer.transforms.value
    if value is None or layer.layout.head_dim not in HADAMARD_HEAD_DIMS:
        return False
    if "cuda_write_signs" not in layer.memo:  # looks at the numbers: that waits for the device
        refuse_capture()
        sizes = value.abs()
        same = sizes == sizes.amax((-2, -1), keepdim=True)
        layer.memo["cuda_write_signs"] = (same & (sizes > 0)).all().cpu()
    return bool(layer.memo["cuda_write_signs"])


def _stored_columns(layer: LayerCache) -> Tensor:
    """A, without the columns of a refined key that are not stored: they would only take precision
    from the others, since a matrix has one scale."""
    key = layer.transforms.key
    if not layer.key_codec.refined:
        return key
    quarter = key.shape[-1] // 4
    stored = key.clone()
    left_out = 1 if layer.key_codec.groups == 2 else 3
    stored[..., left_out * quarter : (left_out + 1) * quarter] = 0
    return stored


def _tiles(head_dim: int) -> int:
    """Tiles of 8 output columns: the words of a row, padded to 4, 8 or 16, times two."""
    words = head_dim // 16
    return 2 * (4 if words <= 4 else 8 if words <= 8 else 16)


def _fragments(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices [..., d, d] -> float16 [..., chunks, tiles, 2 steps, 32 lanes, 8] and what their
    product is to be multiplied with, [...].

    A lane's eight numbers are its B fragment of `mma.m16n8k16` (rows k0, k0 + 1, k1, k1 + 1), of
    the matrix's high parts and of its low parts.
    """
    top = matrices.abs().amax((-2, -1)).double().clamp_min(2.0**-100)
    exponent = torch.floor(torch.log2(top)) - TOP_EXPONENT
    taken = _in_order(matrices.double() * torch.exp2(-exponent)[..., None, None])
    high = taken.half()
    low = (taken - high.double()).half()
    return torch.cat([high, low], -1).contiguous(), torch.exp2(exponent).float()


def _sign_fragments(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The same of matrices of signs, which have no low parts: a lane's eight numbers are those of
    both steps, [..., chunks, tiles, 32 lanes, 8], and zeros fill up the room."""
    size = matrices.abs().amax((-2, -1))
    high = _in_order(matrices.sign().double()).half()
    both = high.transpose(-2, -3).flatten(-2)  # [..., chunks, tiles, lanes, (step, 4)]
    room = torch.zeros_like(torch.cat([high, high], -1))
    room.flatten(-5)[..., : both.flatten(-4).shape[-1]] = both.flatten(-4)
    return room, size.float()


def _in_order(matrices: Tensor) -> Tensor:
    """Their numbers as [..., chunks, tiles, 2 steps, 32 lanes, 4]."""
    rows, columns = (index.to(matrices.device) for index in _order(matrices.shape[-1]))
    padded = torch.nn.functional.pad(matrices, (0, 1, 0, 1))  # index -1: the zeros
    return padded[..., rows, columns]


def _order(dim: int) -> tuple[Tensor, Tensor]:
    """Row and column of each number of the fragments, [chunks, tiles, 2, 32, 4]; -1 beyond."""
    words, tiles = dim // 16, _tiles(dim)
    lane_words = tiles // 8
    chunk = torch.arange(-(-dim // 32)).view(-1, 1, 1, 1, 1)
    tile = torch.arange(tiles).view(-1, 1, 1, 1)
    step = torch.arange(2).view(-1, 1, 1)
    lane = torch.arange(32).view(-1, 1)
    place = torch.arange(4)  # b0: two rows, b1: two rows
    g, t = lane // 4, lane % 4
    row = 32 * chunk + 8 * t + 4 * step + place
    q = 2 * tile + g % 2
    word = g // 2 * lane_words + q % lane_words
    column = torch.where(word < words, q // lane_words * words + word, -1)
    row = torch.where(row < dim, row, -1)
    row, column = torch.broadcast_tensors(row, column)
    return row.contiguous(), column.contiguous()
