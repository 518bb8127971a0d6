"""Attention of one layer: store with `write`, read with `decode` and `prefill`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError, UnsupportedModelError
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.metadata import HistoryMetadata
from oscarkv.integrations.vllm.settings import page_layout, settings_of
from oscarkv.integrations.vllm.step import Step, step_of
from oscarkv.integrations.vllm.windows import SUFFIX, WindowLayer
from oscarkv.kernels import LayerCache


class OscarImpl(AttentionImpl[HistoryMetadata]):  # type: ignore[misc]
    """One per attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.soft_cap = kv_cache_dtype, logits_soft_cap or None
        refused = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "a cache shared between layers": kv_sharing_target_layer_name is not None,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype != "auto",
            **{name: value is not None for name, value in others.items()},
        }
        for what, present in refused.items():
            if present:
                raise UnsupportedModelError(f"oscarkv cannot be used with {what} in vLLM yet")
        self.config = get_current_vllm_config()
        settings = settings_of(self.config)
        if settings is None:
            raise OscarError(
                "--attention-backend CUSTOM is oscarkv's, which needs an artifact: "
                '--additional-config \'{"oscarkv": {"artifact": FILE}}\''
            )
        self.settings = settings
        layers.check_model(settings.loaded, self.config.model_config)
        layers.activate(settings)
        self._name = ""
        self._cache: LayerCache | None = None
        self._bound: tuple[int, int] | None = None

    # -- loading -------------------------------------------------------------------------------

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Add the companion that makes vLLM keep this layer's exact windows."""
        from oscarkv.integrations.vllm.backend import OscarBackend

        known = self.config.compilation_config.static_forward_context
        names = [name for name, layer in known.items() if getattr(layer, "impl", None) is self]
        if len(names) != 1:
            raise OscarError(f"an attention layer is known to vLLM under {len(names)} names")
        self._name = names[0]
        layer, recipe = known[self._name], self.settings.recipe
        layer.attn_backend = OscarBackend
        dtype = layer.kv_cache_torch_dtype
        page = page_layout(recipe, self.head_size, dtype).page_size
        known[self._name + SUFFIX] = WindowLayer(
            self.num_kv_heads, self.head_size, dtype, recipe.sink, recipe.recent, page
        )

    def _layer(self, history: Tensor) -> LayerCache:
        window = get_forward_context().no_compile_layers[self._name + SUFFIX].kv_cache
        bound = (history.data_ptr(), window.data_ptr())
        if self._cache is None or self._bound != bound:
            artifact = self.settings.loaded
            index = extract_layer_index(self._name)
            if index not in artifact.layers:
                raise OscarError(f"layer {index} has no transforms in {self.settings.artifact}")
            self._cache = layers.make_layer(
                artifact.layers[index],
                self.settings,
                layers.rank_heads(artifact.model.kv_heads, self.num_kv_heads),
                self.scale,
                self.soft_cap,
                history,
                window,
            )
            self._bound = bound
        return self._cache

    # -- a step --------------------------------------------------------------------------------

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        if not kv_cache.numel():  # profiling, before there is a cache
            return
        cache = self._layer(kv_cache)
        tokens = slot_mapping.shape[0]
        windows = get_forward_context().slot_mapping[self._name + SUFFIX][:tokens]
        # Block 0 is vLLM's null block: it stands for tokens whose window block was never taken.
        windows = torch.where(windows < PAGE_QUANTUM, -1, windows)
        step_of(self.config, self.settings, kv_cache.device).decoding.write(
            key[:tokens], value[:tokens], slot_mapping, windows, cache
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: HistoryMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None or not kv_cache.numel():
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            raise OscarError("oscarkv does not quantise attention's output")
        cache = self._layer(kv_cache)
        step: Step = step_of(self.config, self.settings, kv_cache.device)
        context = get_forward_context().attn_metadata
        step.plan(attn_metadata, context[self._name + SUFFIX].table, cache)
        out = output.view(-1, self.num_heads, self.head_size)
        step.attend(query, key, value, cache, out)
        return output
