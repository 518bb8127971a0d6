"""Artifact -> what the kernels need of one layer on one rank, over vLLM's own cache tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.codec import RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import ModelMismatchError, OscarError
from oscarkv.integrations.vllm.settings import Settings, page_layout
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.recipe import Recipe

_active: Settings | None = None


def activate(settings: Settings) -> None:
    """Settings of the model that this process is loading; `customize_spec` is told nothing."""
    global _active
    _active = settings


def active() -> Settings:
    if _active is None:
        raise OscarError("oscarkv's attention was asked for without its settings")
    return _active


def check_model(artifact: Artifact, config: Any) -> None:
    """Refuse an artifact of another model. `config`: vLLM's ModelConfig."""
    text = config.hf_text_config
    heads = text.num_attention_heads
    found = {
        "layers": text.num_hidden_layers,
        "query_heads": heads,
        "kv_heads": config.get_total_num_kv_heads(),
        "head_dim": config.get_head_size(),
    }
    for what, theirs in found.items():
        mine = getattr(artifact.model, what)
        if mine != theirs:
            raise ModelMismatchError(
                f"this artifact was calibrated for {artifact.model.name} ({what} {mine}), but the "
                f"model {config.model} has {what} {theirs}; calibrate that model: oscarkv calibrate"
            )
    mine = json.loads(artifact.model.rope or "{}")  # empty: unknown
    theirs = json.loads(json.dumps(getattr(text, "rope_parameters", None) or {}, default=str))
    if not _agrees(mine, theirs):
        raise ModelMismatchError(
            f"this artifact was calibrated for {artifact.model.name} with RoPE {mine}, but the "
            f"model {config.model} has {theirs}; calibrate that model: oscarkv calibrate"
        )


def _agrees(mine: Any, theirs: Any) -> bool:
    """Whether everything said there is said here; vLLM adds parameters of its own."""
    if isinstance(mine, dict):
        return isinstance(theirs, dict) and all(
            key in theirs and _agrees(value, theirs[key]) for key, value in mine.items()
        )
    return bool(mine == theirs)


def rank_heads(total: int, mine: int) -> slice:
    """The KV heads of this rank; with more ranks than heads, several ranks hold the same one."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    first = rank * mine if ranks <= total else rank // (ranks // total)
    return slice(first, first + mine)


def rank_transforms(
    transforms: LayerTransforms, heads: slice, device: torch.device | str
) -> Transforms:
    """The matrices of some KV heads, on the device that uses them."""

    def mine(tensor: Tensor, axis: int = 0) -> Tensor:
        index = (slice(None),) * axis + (heads,)
        return tensor[index].contiguous().to(device)

    return Transforms(
        key=mine(transforms.key),
        query=mine(transforms.query),
        key_mean=mine(transforms.key_mean),
        value=mine(transforms.value),
        value_inverse=mine(transforms.value_inverse),
        value_mean=mine(transforms.value_mean),
        exponents=mine(transforms.exponents, 1),
        metric=None if transforms.metric is None else mine(transforms.metric),
    )


def bind(
    transforms: Transforms,
    memo: dict[str, Tensor],
    recipe: Recipe,
    scale: float,
    soft_cap: float | None,
    history: Tensor,
    window: Tensor,
) -> LayerCache:
    """A layer over vLLM's tensors: history [blocks, heads, 1, bytes] and window
    [blocks, heads, 1, 2 * 16 * d]. `memo` outlives them: it holds constants of the transforms."""
    dim = transforms.key.shape[-1]
    layout = page_layout(recipe, dim, window.dtype)
    pages = history[:, :, 0, : layout.bytes]
    windows = window[:, :, 0].unflatten(-1, (2, PAGE_QUANTUM, dim))
    if pages.dtype != torch.uint8 or pages.stride(-1) != 1 or windows.stride(-1) != 1:
        raise OscarError(
            f"vLLM's cache tensors are not laid out as expected: {history.dtype} "
            f"{tuple(history.shape)} strides {history.stride()}"
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
