"""What kernels need of a layer's matrices, made once and kept in the layer's memo.

Packed words are unpacked in an order of their own, each slot multiplied by a power of two, and
padded to a power of two of words (see `unpack.py`). Permuting and scaling the small matrices once
makes all of that disappear from the kernels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from oscarkv.codec.layout import Plane, RowLayout
from oscarkv.kernels.interface import LayerCache


def padded_words(plane: Plane) -> int:
    return int(triton.next_power_of_2(plane.words))


def columns(plane: Plane) -> int:
    """Columns of a plane once unpacked, padding included."""
    return 2 * plane.slots * padded_words(plane)


def unpacked_order(plane: Plane, *, keys: bool) -> tuple[Tensor, Tensor]:
    """For each unpacked column: its channel, and 2^-(b j), or 0 where there is no channel."""
    width = padded_words(plane)
    slot = torch.arange(plane.slots)[:, None, None]
    word, half = torch.arange(width), torch.arange(2)
    word, half = (word[:, None], half) if keys else (word, half[:, None])
    channel = (2 * slot + half) * plane.words + word
    exists = (word < plane.words) & (channel < plane.head_dim)
    weight = torch.exp2(-plane.bits * (slot % (8 // plane.bits)).double())
    weight = torch.where(exists, weight, 0.0)
    return torch.where(exists, channel, 0).flatten(), weight.flatten()


def _order(row: RowLayout, *, keys: bool) -> tuple[Tensor, Tensor]:
    """The same for all planes of a row, one after the other, with each plane's own weight."""
    channels, weights, shift = [], [], 0
    for plane in row.planes:
        channel, weight = unpacked_order(plane, keys=keys)
        channels.append(channel)
        weights.append(weight * 2.0**shift)
        shift += plane.bits
    return torch.cat(channels), torch.cat(weights)


def _before_fragment_order(x: Tensor) -> Tensor:
    """Columns that `fragment_order` of decode_operands.py brings to the order they have in x."""
    return x.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)


def query_matrices(layer: LayerCache) -> tuple[Tensor, Tensor]:
    """A^-T with its columns in the order of unpacked keys: bf16 [H, d, D], rounded, and the rest.

    Two bf16 numbers hold 16 bits of each entry, and bf16 products are exact in fp32.
    """
    if "triton.query_high" not in layer.memo:
        matrix = layer.transforms.query
        channel, weight = _order(layer.layout.key_row, keys=True)
        channel, weight = channel.to(matrix.device), weight.to(matrix.device, torch.float32)
        ordered = _before_fragment_order(matrix[:, :, channel] * weight)
        high = ordered.bfloat16()
        layer.memo["triton.query_high"] = high.contiguous()
        layer.memo["triton.query_low"] = (ordered - high.float()).bfloat16().contiguous()
    return layer.memo["triton.query_high"], layer.memo["triton.query_low"]


def value_matrices(layer: LayerCache) -> tuple[Tensor, Tensor, Tensor]:
    """B^-1 with its rows in the order of unpacked values [H, D, d]; the sums of its rows over
    each group [H, G, d], which offsets multiply; and m_V [H, d]. All fp32."""
    if "triton.value_matrix" not in layer.memo:
        transforms, layout = layer.transforms, layer.layout
        inverse, mean = transforms.value_inverse, transforms.value_mean
        if inverse is None or mean is None:  # folded: values stay transformed
            eye = torch.eye(layout.head_dim, device=transforms.key.device)
            inverse, mean = eye.expand_as(transforms.key), torch.zeros_like(transforms.key_mean)
        channel, weight = _order(layout.value_row, keys=False)
        channel, weight = channel.to(inverse.device), weight.to(inverse.device, torch.float32)
        layer.memo["triton.value_matrix"] = (inverse[:, channel] * weight[:, None]).contiguous()
        grouped = inverse.unflatten(1, (layout.groups, -1)).sum(2)
        layer.memo["triton.value_offsets"] = grouped.contiguous()
        layer.memo["triton.value_mean"] = mean.contiguous()
    names = ("triton.value_matrix", "triton.value_offsets", "triton.value_mean")
    matrix, offsets, mean = (layer.memo[name] for name in names)
    return matrix, offsets, mean


def key_mean(layer: LayerCache) -> Tensor:
    """m_K, fp32 [H, d]."""
    if "triton.key_mean" not in layer.memo:
        layer.memo["triton.key_mean"] = layer.transforms.key_mean.contiguous()
    return layer.memo["triton.key_mean"]


def exponents(layer: LayerCache) -> Tensor:
    """e0 of keys and values, int32 [2, H], limited as in the format."""
    if "triton.exponents" not in layer.memo:
        limited = layer.transforms.exponents.clamp(-126, 127).to(torch.int32)
        layer.memo["triton.exponents"] = limited.contiguous()
    return layer.memo["triton.exponents"]


def write_matrices(layer: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and B with their columns in (group, channel) order, both padded to powers of two:
    fp32 [H, d, padded]; and the means [H, d]. For a folded value side: the key's, never read."""
    if "triton.write_key" not in layer.memo:
        transforms, groups = layer.transforms, layer.layout.groups
        value, mean = transforms.value, transforms.value_mean
        layer.memo["triton.write_key"] = _pad_groups(transforms.key, groups)
        if value is None or mean is None:
            layer.memo["triton.write_value"] = layer.memo["triton.write_key"]
            layer.memo["triton.write_value_mean"] = key_mean(layer)
        else:
            layer.memo["triton.write_value"] = _pad_groups(value, groups)
            layer.memo["triton.write_value_mean"] = mean.contiguous()
    names = ("triton.write_key", "triton.write_value", "triton.write_value_mean")
    key, value, value_mean = (layer.memo[name] for name in names)
    return key, value, key_mean(layer), value_mean


def _pad_groups(matrix: Tensor, groups: int) -> Tensor:
    heads, dim = matrix.shape[:2]
    size = dim // groups
    padded_groups, padded = triton.next_power_of_2(groups), triton.next_power_of_2(size)
    out = matrix.new_zeros(heads, dim, padded_groups, padded)
    out[:, :, :groups, :size] = matrix.unflatten(-1, (groups, size))
    return out.flatten(2)
