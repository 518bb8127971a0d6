"""Rows of keys and values -> the bytes of a layer's history, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.codec import parameters
from oscarkv.kernels.interface import LayerCache


def encode_tokens(k: Tensor, v: Tensor, layer: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [n, H, d] -> packed K codes, V codes, K and V parameters, each [n, H, ...].

    The transform is summed in fp64 and rounded once, so that a row gets the same codes whether it
    comes alone or in a chunk.
    """
    layout, base = layer.layout, bases(layer)
    means, matrices = _double_transforms(layer)  # [2, H, 1, d] and [2, H, d, d]
    rows = torch.stack([k, v]).double().transpose(1, 2)  # [2, H, n, d]
    rows = ((rows - means) @ matrices).float()
    key_codec, value_codec = layer.key_codec, layer.value_codec
    metric = layer.transforms.metric
    if metric is None and key_codec.shares_grid(value_codec):
        codes, stored = key_codec.encode_with(value_codec, rows[0], rows[1], base[..., None])
        k_packed, v_packed = layout.key_row.pack(codes.transpose(1, 2)).unbind(0)
        k_stored, v_stored = stored.unbind(0)
    else:
        k_codes, k_stored = key_codec.encode(rows[0], base[0, :, None], metric)
        v_codes, v_stored = value_codec.encode(rows[1], base[1, :, None])
        k_packed = layout.key_row.pack(k_codes.transpose(0, 1))
        v_packed = layout.value_row.pack(v_codes.transpose(0, 1))
    return k_packed, v_packed, k_stored.transpose(0, 1), v_stored.transpose(0, 1)


def bases(layer: LayerCache) -> Tensor:
    """2^e0 of keys and values, [2, H]."""
    if "bases" not in layer.memo:
        layer.memo["bases"] = parameters.bases(layer.transforms.exponents)
    return layer.memo["bases"]


def _double_transforms(layer: LayerCache) -> tuple[Tensor, Tensor]:
    """Means and transforms of keys and values, stacked in fp64, made once for a layer."""
    if "matrices" not in layer.memo:
        transforms = layer.transforms
        value, mean = transforms.value, transforms.value_mean
        if value is None or mean is None:  # folded: values come transformed
            eye = torch.eye(transforms.key.shape[-1], device=transforms.key.device)
            value, mean = eye.expand_as(transforms.key), torch.zeros_like(transforms.key_mean)
        layer.memo["matrices"] = torch.stack([transforms.key, value]).double()
        layer.memo["means"] = torch.stack([transforms.key_mean, mean]).double()[:, :, None]
    return layer.memo["means"], layer.memo["matrices"]


def decode_tokens(pages: Tensor, layer: LayerCache) -> tuple[Tensor, Tensor]:
    """History pages uint8 [p, H, bytes] -> the keys and values they stand for, [p P, H, d]."""
    transforms, layout = layer.transforms, layer.layout
    sections = (s.transpose(1, 2).flatten(0, 1) for s in layout.sections(pages))
    k_codes, v_codes, k_stored, v_stored = sections
    base = bases(layer)
    keys = layer.key_codec.decode(layout.key_row.unpack(k_codes), k_stored, base[0])
    values = layer.value_codec.decode(layout.value_row.unpack(v_codes), v_stored, base[1])
    k = torch.einsum("nhd,hed->nhe", keys, transforms.query) + transforms.key_mean
    if transforms.value_inverse is None or transforms.value_mean is None:
        return k, values
    return k, torch.einsum("nhd,hde->nhe", values, transforms.value_inverse) + transforms.value_mean
