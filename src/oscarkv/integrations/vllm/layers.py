"""Artifact -> what the kernels need of one layer on one rank, over vLLM's own cache tensors."""

from __future__ import annotations

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


def rank_heads(total: int, mine: int) -> slice:
    """The KV heads of this rank; with more ranks than heads, several ranks hold the same one."""
    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    first = rank * mine if ranks <= total else rank // (ranks // total)
    return slice(first, first + mine)


def make_layer(
    transforms: LayerTransforms,
    settings: Settings,
    heads: slice,
    scale: float,
    soft_cap: float | None,
    history: Tensor,
    window: Tensor,
) -> LayerCache:
    """history: vLLM's [blocks, heads, 1, bytes]; window: [blocks, heads, 1, 2 * 16 * d]."""
    recipe, dim = settings.recipe, transforms.key_mean.shape[-1]
    layout = page_layout(recipe, dim, window.dtype)
    device = history.device

    def mine(tensor: Tensor | None, axis: int = 0) -> Tensor | None:
        if tensor is None:
            return None
        index = (slice(None),) * axis + (heads,)
        return tensor[index].contiguous().to(device)

    def need(tensor: Tensor, axis: int = 0) -> Tensor:
        found = mine(tensor, axis)
        assert found is not None
        return found

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
        transforms=Transforms(
            key=need(transforms.key),
            query=need(transforms.query),
            key_mean=need(transforms.key_mean),
            value=need(transforms.value),
            value_inverse=need(transforms.value_inverse),
            value_mean=need(transforms.value_mean),
            exponents=need(transforms.exponents, 1),
            metric=mine(transforms.metric),
        ),
        layout=layout,
        key_codec=RowCodec.for_keys(recipe, dim),
        value_codec=RowCodec.for_values(recipe, dim),
        sink=recipe.sink,
        recent=recipe.recent,
        scale=scale,
        soft_cap=soft_cap,
    )
