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
        parts, shift = [], 0
        for plane in self.planes:
            field = (codes.int() >> shift) & ((1 << plane.bits) - 1)
            shift += plane.bits
            padding = 2 * plane.slots * plane.words - self.head_dim
            field = torch.nn.functional.pad(field, (0, padding))
            field = field.unflatten(-1, (plane.slots, 2, plane.words))
            offsets = plane.bits * torch.arange(plane.slots, device=codes.device)
            halves = (field << offsets.int()[:, None, None]).sum(-3, dtype=torch.int32)
            words = halves[..., 0, :] | (halves[..., 1, :] << 16)
            parts.append(words.contiguous().view(torch.uint8))
        return torch.cat(parts, -1)

    def unpack_fragments(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes [..., bytes] -> codes [..., N] in `fragment_channels` order (cheap to produce)."""
        parts, start = None, 0
        for plane in self.planes:
            stop = start + 4 * plane.words
            words = packed[..., start:stop].contiguous().view(torch.int32)
            start = stop
            mask = 0x00010001 * ((1 << plane.bits) - 1)
            shifts = _shifts(plane.bits, str(packed.device))
            pairs = (words.unsqueeze(-2) >> shifts) & mask
            codes = pairs.view(torch.int16).flatten(-2).to(dtype)
            if parts is None:
                parts = codes
            else:  # the high bit of 3-bit codes: bring both planes to channel order first
                low = parts[..., _positions(self.planes[0], str(packed.device))]
                high = codes[..., _positions(plane, str(packed.device))]
                return low + high * (1 << self.planes[0].bits)
        assert parts is not None
        return parts

    @cached_property
    def fragment_channels(self) -> Tensor:
        """The channel of each code that `unpack_fragments` gives; >= head_dim for padding."""
        if len(self.planes) > 1:
            return torch.arange(self.head_dim)
        return _fragment_channels(self.planes[0])

    @cached_property
    def channel_positions(self) -> Tensor:
        """Where each channel lies among the codes that `unpack_fragments` gives."""
        return self.fragment_channels.argsort()[: self.head_dim]

    def unpack(self, packed: Tensor) -> Tensor:
        """Bytes uint8 [..., bytes] -> codes uint8 [..., head_dim] in channel order."""
        codes = self.unpack_fragments(packed, torch.uint8)
        return codes[..., self.channel_positions.to(packed.device)]


def _fragment_channels(plane: Plane) -> Tensor:
    slot = torch.arange(plane.slots)[:, None, None]
    word = torch.arange(plane.words)[None, :, None]
    half = torch.arange(2)[None, None, :]
    return ((2 * slot + half) * plane.words + word).flatten()


@lru_cache(maxsize=64)
def _shifts(bits: int, device: str) -> Tensor:
    return torch.arange(0, 16, bits, dtype=torch.int32, device=device).unsqueeze(-1)


@lru_cache(maxsize=64)
def _positions(plane: Plane, device: str) -> Tensor:
    """Where each channel lies among the codes of `unpack_fragments`."""
    return _fragment_channels(plane).argsort()[: plane.head_dim].to(device)


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
