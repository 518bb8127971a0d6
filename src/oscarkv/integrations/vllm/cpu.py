"""On CPU vLLM always takes CPU_ATTN: stand in for it, and hand over to it unless asked not to."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    group_kernel_blocks,
    iter_layer_specs,
)

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.vllm.settings import settings_of


class SwitchBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Stock attention, except that layers get our implementation where a server asks for it; that
    then puts `OscarBackend` in this class's place."""

    @staticmethod
    def get_impl_cls() -> type:
        if settings_of(get_current_vllm_config_or_none()) is None:
            return CPUAttentionBackend.get_impl_cls()
        from oscarkv.integrations.vllm.impl import OscarImpl

        return OscarImpl


def zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """New blocks in every layer whose pages are not states. `runner`: CPUModelRunner."""
    cache = runner.kv_cache_config
    known = runner.compilation_config.static_forward_context
    groups = [
        group
        for group in cache.kv_cache_groups
        if all(isinstance(spec, AttentionSpec) for spec in iter_layer_specs(group.kv_cache_spec))
    ]
    tensors = [known[name].kv_cache for group in groups for name in group.layer_names]
    for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values():  # groups overlay
        group_kernel_blocks(tensor, cache.num_blocks)[block_ids] = 0


class KeptBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Stock attention in blocks of 16 tokens, which its code for odd blocks reads as well."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return [MultipleOf(PAGE_QUANTUM)]
