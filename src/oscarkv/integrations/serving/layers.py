"""Artifact -> what the kernels need of one layer on one rank."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.codec import PageLayout, RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import ModelMismatchError, OscarError
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.recipe import Recipe


def check_identity(artifact: Artifact, model: str, found: dict[str, int], rope: Any) -> None:
    """Refuse an artifact of another model. `found`: its layers, query_heads, kv_heads and
    head_dim; `rope`: its configuration's RoPE parameters."""
    for what, theirs in found.items():
        mine = getattr(artifact.model, what)
        if mine != theirs:
            raise ModelMismatchError(
                f"this artifact was calibrated for {artifact.model.name} ({what} {mine}), but the "
                f"model {model} has {what} {theirs}; calibrate that model: oscarkv calibrate"
            )
    mine = json.loads(artifact.model.rope or "{}")  # empty: unknown
    theirs = json.loads(json.dumps(rope or {}, default=str))
    if not _agrees(mine, theirs):
        raise ModelMismatchError(
            f"this artifact was calibrated for {artifact.model.name} with RoPE {mine}, but the "
            f"model {model} has {theirs}; calibrate that model: oscarkv calibrate"
        )


def _agrees(mine: Any, theirs: Any) -> bool:
    """Whether everything said there is said here; engines add parameters of its own."""
    if isinstance(mine, dict):
        return isinstance(theirs, dict) and all(
            key in theirs and _agrees(value, theirs[key]) for key, value in mine.items()
        )
    return bool(mine == theirs)


def rank_heads(total: int, mine: int, rank: int, ranks: int) -> slice:
    """The KV heads of a rank; with more ranks than heads, several ranks hold the same one."""
    first = rank * mine if ranks <= total else rank // (ranks // total)
    return slice(first, first + mine)


def rank_transforms(
    transforms: LayerTransforms, heads: slice, device: torch.device | str, folded: bool = False
) -> Transforms:
    """The matrices of some KV heads, on the device that uses them; `folded`: the weights have
    those of the values."""

    def mine(tensor: Tensor, axis: int = 0) -> Tensor:
        index = (slice(None),) * axis + (heads,)
        return tensor[index].contiguous().to(device)

    return Transforms(
        key=mine(transforms.key),
        query=mine(transforms.query),
        key_mean=mine(transforms.key_mean),
        value=None if folded else mine(transforms.value),
        value_inverse=None if folded else mine(transforms.value_inverse),
        value_mean=None if folded else mine(transforms.value_mean),
        exponents=mine(transforms.exponents, 1),
        metric=None if transforms.metric is None else mine(transforms.metric),
    )


def layer_cache(
    transforms: Transforms,
    memo: dict[str, Tensor],
    recipe: Recipe,
    scale: float,
    soft_cap: float | None,
    layout: PageLayout,
    pages: Tensor,
    windows: Tensor,
) -> LayerCache:
    """A layer over an engine's tensors: pages [n, heads, bytes at least] and windows
    [n, heads, 2 * 16 * d]. `memo` outlives them: it holds constants of the transforms."""
    dim = transforms.key.shape[-1]
    pages = pages[..., : layout.bytes]
    windows = windows.unflatten(-1, (2, PAGE_QUANTUM, dim))
    if pages.dtype != torch.uint8 or pages.stride(-1) != 1 or windows.stride(-1) != 1:
        raise OscarError(
            f"the engine's cache tensors are not laid out as expected: {pages.dtype} "
            f"{tuple(pages.shape)} strides {pages.stride()}"
        )
    return LayerCache(
        history=pages,
        window=windows,
        transforms=transforms,
        layout=layout,
        key_codec=RowCodec.for_keys(recipe, dim),
        value_codec=RowCodec.for_values(recipe, dim),
        sink=recipe.sink,
        recent=recipe.recent,
        scale=scale,
        soft_cap=soft_cap,
        memo=memo,
    )
