"""The model and the cache tensors as vLLM has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from oscarkv.artifact import Artifact
from oscarkv.codec import PageLayout
from oscarkv.errors import OscarError
from oscarkv.integrations.serving.layers import check_identity, layer_cache
from oscarkv.integrations.serving.layers import rank_heads as heads_of
from oscarkv.integrations.vllm.settings import Settings
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.recipe import Recipe

_active: Settings | None = None


def activate(settings: Settings) -> None:
    """Settings of the model that this process is loading; `customize_spec` is told nothing."""
    global _active
    _active = settings


def current() -> Settings | None:
    return _active


def active() -> Settings:
    if _active is None:
        raise OscarError("oscarkv's attention was asked for without its settings")
    return _active


def check_model(artifact: Artifact, config: Any) -> None:
    """Refuse an artifact of another model. `config`: vLLM's ModelConfig."""
    text = config.hf_text_config
    found = {
        "layers": text.num_hidden_layers,
        "query_heads": text.num_attention_heads,
        "kv_heads": config.get_total_num_kv_heads(),
        "head_dim": config.get_head_size(),
    }
    check_identity(artifact, config.model, found, getattr(text, "rope_parameters", None))


def rank_heads(total: int, mine: int) -> slice:
    """The KV heads of this rank."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return heads_of(total, mine, rank, ranks)


def bind(
    transforms: Transforms,
    memo: dict[str, Tensor],
    recipe: Recipe,
    layout: PageLayout,
    scale: float,
    soft_cap: float | None,
    history: Tensor,
    window: Tensor,
) -> LayerCache:
    """A layer over vLLM's tensors: history [blocks, heads, 1, bytes] and window
    [blocks, heads, 1, 2 * 16 * d]."""
    pages, windows = history[:, :, 0], window[:, :, 0]
    return layer_cache(transforms, memo, recipe, scale, soft_cap, layout, pages, windows)
