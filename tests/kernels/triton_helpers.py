"""Layers on the device under test, and rows that are hard to encode."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from helpers import generator
from torch import Tensor

from oscarkv.codec import RowCodec, parameters
from oscarkv.codec.encode import REFINED_SCALE, _quarter_power
from oscarkv.kernels import LayerCache

#: Parameters of a case that also runs compiled, under `make test-gpu`: a few, for the compiler is
#: slow.
COMPILED = partial(pytest.param, marks=pytest.mark.compiled)


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


def assert_codes_at_thresholds(
    ours: LayerCache, oracle: LayerCache, k: Tensor, v: Tensor, slots: Tensor
) -> None:
    """Of parameters that come out equal, at most 0.1 % of the codes, where x is at a threshold."""
    layout, transforms = oracle.layout, oracle.transforms
    base = parameters.bases(transforms.exponents)
    pages, offsets = slots // layout.page_size, slots % layout.page_size
    mine, theirs = (
        [s[pages, :, offsets] for s in layout.sections(x.history)] for x in (ours, oracle)
    )
    sides = (
        (k, transforms.key, transforms.key_mean, layout.key_row, oracle.key_codec),
        (v, transforms.value, transforms.value_mean, layout.value_row, oracle.value_codec),
    )
    for side, (x, matrix, mean, row, codec) in enumerate(sides):
        assert matrix is not None
        codes, expected, stored, its = (
            x.unflatten(-1, (layout.groups, -1))
            for x in (
                row.unpack(mine[side]),
                row.unpack(theirs[side]),
                mine[2 + side],
                theirs[2 + side],
            )
        )
        same = (stored == its).all(-1)
        assert float(same.float().mean()) > 0.98
        different = (codes != expected) & same[..., None]
        assert float(different.float().mean()) <= 1e-3
        rows = torch.einsum("nhd,hde->nhe", x.double() - mean, matrix.double()).float()
        distances = _distances(rows, base[side], codec).unflatten(-1, (layout.groups, -1))
        assert bool((distances[different] < 2**-10).all())


def _distances(rows: Tensor, base: Tensor, codec: RowCodec) -> Tensor:
    """How far each channel of rows [..., d] is from a threshold, in steps of its row's grid."""
    quarter, whole = rows.shape[-1] // 4, rows
    if codec.refined and codec.groups == 2:
        return _split_distances(rows, base, codec)
    if codec.refined:
        rows = rows[..., : 3 * quarter]
    stored, s, lo = codec._fit(rows, base, lambda r: _quarter_power(r, codec.gain))
    distances = _from_thresholds(rows, s, lo, codec)
    if not codec.refined:
        return distances
    first, second = _digit_distances(
        whole[..., :quarter] * REFINED_SCALE[codec.bits], stored, base, codec
    )
    return torch.cat([first, distances[..., quarter:], second], -1)


def _split_distances(rows: Tensor, base: Tensor, codec: RowCodec) -> Tensor:
    quarter, plain = rows.shape[-1] // 4, replace(codec, groups=1, refined=False)
    _, stored = codec.encode(rows, base)
    digits = _digit_distances(rows[..., :quarter], stored[..., :1], base, plain)
    return torch.cat([*digits, _distances(rows[..., 2 * quarter :], base, plain)], -1)


def _digit_distances(
    rows: Tensor, stored: Tensor, base: Tensor, codec: RowCodec
) -> tuple[Tensor, Tensor]:
    s, lo = parameters.load(stored, codec.parameter_format, codec.levels, base[..., None])
    rest = (rows - (s * codec._codes(rows, s, lo).float() + lo)) * codec.levels
    first = _from_thresholds(rows, s, lo, codec)
    # Where the first digit is another one, so is the second.
    return first, torch.minimum(first, _from_thresholds(rest, s, lo, codec) / codec.levels)


def _from_thresholds(rows: Tensor, s: Tensor, lo: Tensor, codec: RowCodec) -> Tensor:
    grouped = rows.unflatten(-1, (codec.groups, -1))[..., None]
    steps = (grouped - codec._thresholds(s, lo)[..., None, :]) / s[..., None, None]
    return steps.abs().amin(-1).flatten(-2)
