"""Layers that keep vLLM's own cache and attention: windows, sinks, no transforms, or by request.

A layer is built before it is known which one it is. So each gets our implementation first, and
hands over to vLLM's when the weights have been loaded.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError, UnsupportedModelError
from oscarkv.integrations.vllm.settings import Settings
from oscarkv.integrations.vllm.windows import SUFFIX


def keeps_own_cache(layer: Any, index: int, arguments: dict[str, Any], settings: Settings) -> bool:
    """Whether an attention layer is not to be packed; `arguments` are those its implementation
    was made with."""
    return (
        index in settings.skip
        or index not in settings.loaded.layers
        or arguments["sliding_window"] is not None
        or arguments["alibi_slopes"] is not None
        or arguments["attn_type"] != AttentionType.DECODER
        or arguments["kv_sharing_target_layer_name"] is not None
        or {layer.head_size, layer.head_size_v} != {settings.loaded.model.head_dim}
        or any(value is not None for value in arguments["others"].values())  # such as sinks
    )


def require_readable(target: str | None, known: dict[str, Any]) -> None:
    """Refuse stock attention over the cache of a layer that is packed."""
    if target is not None and target + SUFFIX in known:
        raise UnsupportedModelError(
            f"oscarkv cannot be used with this model: a layer reads the cache of {target}, which "
            f'is packed; keep that one with "skip": [{extract_layer_index(target)}]'
        )


def require_unwrapped(layer: Any, name: str) -> None:
    """Refuse a layer around whose backend vLLM puts more (chunks, encoders, cross attention):
    neither our attention nor what `hand_over` gives it would do that."""
    if layer.attn_backend is not first_backend():
        raise UnsupportedModelError(
            f"oscarkv cannot be used with this model: {name} is a {type(layer).__name__}, whose "
            "attention is neither packed nor kept"
        )


def first_backend() -> type[AttentionBackend]:
    """What vLLM chooses for every layer of a server that asks for oscarkv."""
    if current_platform.is_cpu():
        from oscarkv.integrations.vllm.cpu import SwitchBackend

        return SwitchBackend
    from oscarkv.integrations.vllm.backend import OscarBackend

    return OscarBackend


def hand_over(layer: Any, arguments: dict[str, Any], config: Any, act_dtype: Any) -> None:
    """Give a layer vLLM's own attention, in blocks of as many bytes as ours."""
    arguments = dict(arguments)
    others = arguments.pop("others")
    known = config.compilation_config.static_forward_context
    require_readable(arguments["kv_sharing_target_layer_name"], known)
    stock: Any = stock_backend(layer, config)
    layer.attn_backend = planning_in_the_kernel(stock)
    layer.backend = AttentionBackendEnum[stock.get_name()]
    with set_current_vllm_config(config):
        layer.impl = stock.get_impl_cls()(**arguments, **others)
    layer.impl.process_weights_after_loading(act_dtype)
    plain = layer.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        spec = plain(vllm_config)
        return spec and dataclasses.replace(spec, block_size=PAGE_QUANTUM)

    layer.get_kv_cache_spec = get_kv_cache_spec


@cache
def planning_in_the_kernel(stock: type[AttentionBackend]) -> type[AttentionBackend]:
    """A stock backend that does not plan FlashAttention 3's work ahead.

    It does so only while all its layers have one window, which those of a model with windows have
    as soon as the others are packed. But a plan of sequences shorter than the window does not fit
    the kernel that a graph has captured, and runner V1 captures a plan for each group of layers
    and then renews that of the first alone: answers were NaN. Without a plan the kernel makes its
    own, as it does for such a model in stock vLLM.
    """
    plain: Any = stock.get_builder_cls()

    class Builder(plain):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            if hasattr(self, "aot_schedule"):
                self.aot_schedule = False

    class Kept(stock):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    Kept.__qualname__ = f"Kept{stock.__name__}"  # by which vLLM tells backends apart
    return Kept


def stock_backend(layer: Any, config: Any) -> type[AttentionBackend]:
    """What vLLM would choose for a layer if nobody had asked for another."""
    if current_platform.is_cpu():
        from oscarkv.integrations.vllm.cpu import KeptBackend

        return KeptBackend
    attention = config.attention_config
    asked, attention.backend = attention.backend, None
    try:
        with set_current_vllm_config(config):
            found = get_attn_backend(
                layer.head_size,
                layer.dtype,
                layer.kv_cache_dtype,
                has_sink=layer.has_sink,
                use_mm_prefix=layer.use_mm_prefix,
                attn_type=layer.attn_type,
                has_sliding_window=layer.sliding_window is not None,
            )
    finally:
        attention.backend = asked
    sizes = found.get_supported_kernel_block_sizes()
    if not any(
        PAGE_QUANTUM % size.base == 0 if isinstance(size, MultipleOf) else size == PAGE_QUANTUM
        for size in sizes
    ):
        raise OscarError(
            f"vLLM's {found.get_name()}, which {layer.layer_name} would use, has no blocks of "
            f"{PAGE_QUANTUM} tokens: the layer cannot keep its cache beside packed ones"
        )
    return found
