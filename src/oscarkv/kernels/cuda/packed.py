"""The packed formats that the CUDA kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.kernels.interface import LayerCache

HALF_TYPES = (torch.bfloat16, torch.float16)
PARAMETER_CODES = {"fp16": 0, "log8": 1, "log8-symmetric": 2}
LARGEST_HEAD_DIM = 256
#: Of a code.
MOST_BITS = 3
#: Where values that are stored times a Hadamard matrix have a shorter way through the kernels.
HADAMARD_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class PackedFormat:
    """Macros of common.cuh, the same for every kernel."""

    head_dim: int
    groups: int
    parameters: str
    page_size: int
    key_bits: int
    value_bits: int
    bfloat16: bool  # activations; otherwise float16

    def macros(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.head_dim,
            "GROUPS": self.groups,
            "PARAMETERS": PARAMETER_CODES[self.parameters],
            "PAGE": self.page_size,
            "KEY_BITS": self.key_bits,
            "VALUE_BITS": self.value_bits,
            "BF16": int(self.bfloat16),
        }


def format_of(x: Tensor, layer: LayerCache) -> tuple[int, int, str, int, int, int, bool]:
    """The fields of a `PackedFormat`, for activations and a layer."""
    layout = layer.layout
    return (
        layout.head_dim,
        layout.groups,
        layout.parameter_format,
        layout.page_size,
        layout.key_bits,
        layout.value_bits,
        x.dtype == torch.bfloat16,
    )


def unsupported_format(x: Tensor, layer: LayerCache) -> str | None:
    """Why no CUDA kernel takes this layer, or None."""
    layout = layer.layout
    words = layout.head_dim // 16
    bits = max(layout.key_bits, layout.value_bits)
    if bits > MOST_BITS:
        return f"{layout.key_bits} and {layout.value_bits} bits"
    # The high bits of 3 must fill whole words, as the low ones do.
    if bits == 3 and (words % 2 or layout.groups > 1):
        return f"3 bits in {layout.groups} groups of head_dim {layout.head_dim}"
    if layout.head_dim > LARGEST_HEAD_DIM:
        return f"head_dim {layout.head_dim}"
    # Groups must be runs of slots, the same in every word.
    if layout.groups > 1 and (words not in (4, 8, 16) or 2 * layout.groups > words):
        return f"{layout.groups} groups of head_dim {layout.head_dim}"
    if x.dtype not in HALF_TYPES or layer.window.dtype != x.dtype:
        return f"{x.dtype} with windows in {layer.window.dtype}"
    return None
