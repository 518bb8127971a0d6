"""Layers on the device under test, and rows that are hard to encode."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from helpers import generator
from torch import Tensor

from oscarkv.kernels import LayerCache


def moved(layer: LayerCache, device: torch.device) -> LayerCache:
    """A copy of a layer, its storage and matrices on `device`."""
    values = {f.name: getattr(layer.transforms, f.name) for f in fields(layer.transforms)}
    values = {name: None if x is None else x.to(device) for name, x in values.items()}
    return replace(
        layer,
        history=layer.history.clone().to(device),
        window=layer.window.clone().to(device),
        transforms=replace(layer.transforms, **values),
        memo={},
    )


def without_transforms(layer: LayerCache) -> LayerCache:
    """Keys keep their rows (times the identity), values are folded: stored rows are as given."""
    transforms = layer.transforms
    eye = torch.eye(transforms.key.shape[-1]).expand_as(transforms.key).contiguous()
    plain = replace(
        transforms,
        key=eye,
        query=eye,
        key_mean=torch.zeros_like(transforms.key_mean),
        value=None,
        value_inverse=None,
        value_mean=None,
    )
    return replace(layer, transforms=plain, memo={})


def hard_rows(count: int, heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values [count, heads, d], count >= 8, some with an offset, a spike, zeros, ...

    Keys have 11 bits: the identity then keeps them exactly, even as a sum of tf32 products.
    """
    x = torch.randn(2, count, heads, dim, generator=generator(seed))
    x[:, 1] = x[:, 1] * 3 + 5
    x[:, 2] = 0
    x[:, 2, :, 3] = 50
    x[:, 3] = 0.7
    x[:, 4] *= 1e-3
    x[:, 4, :, dim // 2 :] = 0
    x[:, 5] *= 3e3
    x[:, 6] = 0
    x[:, 7, :, ::2] *= 20
    return x[0].half().float(), x[1]
