"""Where the bits of a row, and the rows of a page, lie.

A row is one token's key or value in one KV head: `head_dim` codes of 2, 3 or 4 bits.

    plane of b bits over d channels: W = ceil(d b / 32) little-endian 32-bit words

      word w   | half e = 1             | half e = 0             |
               | slot 16/b-1 ... slot 0 | slot 16/b-1 ... slot 0 |    slot p: bits 16 e + b p
      channel of (w, e, p) = (2 p + e) W + w;  channels >= d are zero

2-bit and 4-bit rows are one such plane; a 3-bit row is a 2-bit plane of the low bits followed by
a 1-bit plane of the high bits. For d = 128 and 2 bits: 8 words, channel 16 p + 8 e + w, the order
in which a lane's word is its tensor-core fragment for keys and for values alike.

    page of P tokens, for one KV head
      | K codes [P][kb] | V codes [P][vb] | K parameters [P][G pb] | V parameters [P][G pb] | pad |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from oscarkv.errors import RecipeError
from oscarkv.recipe import PARAMETER_BITS, Recipe

#: Page sizes are multiples of this; window pages hold exactly this many tokens.
PAGE_QUANTUM = 16
#: Pages of a head start at multiples of this many bytes, so that wide loads stay aligned.
ALIGNMENT = 16


class Workspace:
    """Buffers that are used again: fresh ones of a megabyte cost more than what is done in them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor of that shape with arbitrary content; the last one of that name is void."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype, device))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size + size // 4, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = buffer
        return buffer[:size].view(*shape)


@dataclass(frozen=True)
class Plane:
    """One bit plane of a row."""

    bits: int
    head_dim: int

    @property
    def words(self) -> int:
        return -(-self.head_dim * self.bits // 32)

    @property
    def slots(self) -> int:
        return 16 // self.bits


@dataclass(frozen=True)
class RowLayout:
    """The packed codes of one row."""

    head_dim: int
    bits: int

    def __post_init__(self) -> None:
        if self.head_dim < 16 or self.head_dim % 16:
            raise RecipeError(f"head_dim {self.head_dim} is not a multiple of 16: not supported")

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        widths = (2, 1) if self.bits == 3 else (self.bits,)
        return tuple(Plane(bits, self.head_dim) for bits in widths)

    @property
    def bytes(self) -> int:
        return 4 * sum(plane.words for plane in self.planes)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes uint8 [..., head_dim] in channel order -> bytes uint8 [..., bytes]."""
        if len(self.planes) == 1:
            return _pack_plane(codes.int(), self.planes[0])
        low, high = self.planes
        codes = codes.int()
        mask = (1 << low.bits) - 1
        return torch.cat([_pack_plane(codes & mask, low), _pack_plane(codes >> low.bits, high)], -1)

    def unpack_columns(
        self, packed: Tensor, dtype: torch.dtype, workspace: Workspace | None = None
    ) -> Tensor:
        """Rows of bytes [..., n, bytes] -> their codes as columns [..., head_dim, n].

        Columns, because then every step runs over long contiguous vectors. With a workspace the
        result lies in it, until the next call.
        """
        workspace = Workspace() if workspace is None else workspace
        codes, start, weight = None, 0, 1
        for plane in self.planes:
            stop = start + 4 * plane.words
            halves = packed[..., start:stop].contiguous().view(torch.int16)
            halves = halves.unflatten(-1, (plane.words, 2)).movedim(-3, -1).transpose(-3, -2)
            halves = halves.contiguous().unsqueeze(-4)  # [..., 1, half, word, n]
            shape = (*halves.shape[:-4], plane.slots, *halves.shape[-3:])
            fields = workspace.take("fields", shape, torch.int16, packed.device)
            torch.bitwise_right_shift(halves, _shifts(plane.bits, str(packed.device)), out=fields)
            fields &= (1 << plane.bits) - 1
            columns = fields.flatten(-4, -2)[..., : self.head_dim, :]  # channel order
            if codes is None:
                codes = workspace.take("codes", columns.shape, dtype, packed.device)
                codes.copy_(columns)
            else:
                codes += columns.to(dtype) * weight
            start, weight = stop, weight << plane.bits
        assert codes is not None
        return codes

    def unpack(self, packed: Tensor) -> Tensor:
        """Bytes uint8 [..., bytes] -> codes uint8 [..., head_dim] in channel order."""
        return self.unpack_columns(packed.unsqueeze(-2), torch.uint8).squeeze(-1)


def _pack_plane(field: Tensor, plane: Plane) -> Tensor:
    padding = 2 * plane.slots * plane.words - plane.head_dim
    if padding:
        field = torch.nn.functional.pad(field, (0, padding))
    field = field.unflatten(-1, (plane.slots, 2, plane.words))
    halves = (field << _shifts(plane.bits, str(field.device))[..., 0]).sum(-3, dtype=torch.int32)
    words = halves[..., 0, :] | (halves[..., 1, :] << 16)
    return words.contiguous().view(torch.uint8)


@lru_cache(maxsize=64)
def _shifts(bits: int, device: str) -> Tensor:
    """First bit of each slot of a half word, [slots, 1, 1, 1]."""
    return torch.arange(0, 16, bits, dtype=torch.int16, device=device)[:, None, None, None]


@dataclass(frozen=True)
class PageLayout:
    """The bytes of one history page, for one KV head."""

    page_size: int
    head_dim: int
    key_bits: int
    value_bits: int
    groups: int
    parameter_format: str

    def __post_init__(self) -> None:
        if not 16 <= self.page_size <= 256 or self.page_size % PAGE_QUANTUM:
            raise RecipeError(
                f"page size {self.page_size} is not a multiple of {PAGE_QUANTUM} from 16 to 256"
            )

    @classmethod
    def of(cls, recipe: Recipe, head_dim: int, page_size: int) -> PageLayout:
        return cls(
            page_size,
            head_dim,
            recipe.key_bits,
            recipe.value_bits,
            recipe.groups(head_dim),
            recipe.parameter_format(head_dim),
        )

    @cached_property
    def key_row(self) -> RowLayout:
        return RowLayout(self.head_dim, self.key_bits)

    @cached_property
    def value_row(self) -> RowLayout:
        return RowLayout(self.head_dim, self.value_bits)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one row's parameters."""
        return self.groups * PARAMETER_BITS[self.parameter_format] // 8

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Start of K codes, V codes, K parameters, V parameters, and the end of the data."""
        sizes = (
            self.key_row.bytes,
            self.value_row.bytes,
            self.parameter_bytes,
            self.parameter_bytes,
        )
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size * self.page_size)
        return starts[0], starts[1], starts[2], starts[3], starts[4]

    @property
    def bytes(self) -> int:
        return -(-self.offsets[-1] // ALIGNMENT) * ALIGNMENT

    def sections(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of pages [..., bytes]: K codes, V codes, K and V parameters, each [..., P, n]."""
        k, v, kp, vp, end = self.offsets
        shape = (self.page_size, -1)
        return (
            pages[..., k:v].unflatten(-1, shape),
            pages[..., v:kp].unflatten(-1, shape),
            pages[..., kp:vp].unflatten(-1, shape),
            pages[..., vp:end].unflatten(-1, shape),
        )
