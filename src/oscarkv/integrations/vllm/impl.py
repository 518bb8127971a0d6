"""Attention of one layer: store with `write`, read with `decode` and `prefill`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from oscarkv.errors import OscarError, UnsupportedModelError
from oscarkv.integrations.serving.layers import rank_transforms
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.kept import hand_over, keeps_own_cache, require_unwrapped
from oscarkv.integrations.vllm.metadata import HistoryMetadata
from oscarkv.integrations.vllm.settings import (
    NEEDS_ARTIFACT,
    page_layout,
    settings_of,
)
from oscarkv.integrations.vllm.step import steps_of
from oscarkv.integrations.vllm.windows import SUFFIX, WindowLayer
from oscarkv.kernels import LayerCache, Transforms


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
        self.arguments = {
            "num_heads": num_heads,
            "head_size": head_size,
            "scale": scale,
            "num_kv_heads": num_kv_heads,
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "kv_cache_dtype": kv_cache_dtype,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "others": others,
        }
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.soft_cap = kv_cache_dtype, logits_soft_cap or None
        self.config = get_current_vllm_config()
        settings = settings_of(self.config)
        if settings is None:
            raise OscarError(NEEDS_ARTIFACT)
        self.settings = settings
        layers.check_model(settings.loaded, self.config.model_config)
        layers.activate(settings)
        self._windows: WindowLayer | None = None
        self._windows_name = ""
        self._transforms: Transforms | None = None
        self._memo: dict[str, Tensor] = {}
        self.folded = False  # values come transformed: fold.py
        self._index = 0  # of the layer, once it is known

    # -- loading -------------------------------------------------------------------------------

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Add the companion that makes vLLM keep this layer's exact windows, or step aside."""
        from oscarkv.integrations.vllm.backend import OscarBackend

        # vLLM may load weights again. What is ours stays then: windows that have a cache by now,
        # and tensors that captured graphs read.
        if self._transforms is not None:
            self._require_plain_weights()
            return
        known = self.config.compilation_config.static_forward_context
        names = [name for name, layer in known.items() if getattr(layer, "impl", None) is self]
        if len(names) != 1:
            raise OscarError(f"an attention layer is known to vLLM under {len(names)} names")
        layer, recipe = known[names[0]], self.settings.recipe
        artifact, index = self.settings.loaded, extract_layer_index(names[0])
        require_unwrapped(layer, names[0])
        if keeps_own_cache(layer, index, self.arguments, self.settings):
            hand_over(layer, self.arguments, self.config, act_dtype)
            return
        layer.attn_backend = OscarBackend
        dtype, self._index = layer.kv_cache_torch_dtype, index
        page = page_layout(recipe, self.head_size, dtype).page_size
        if index in artifact.layer_bits:
            size = self.settings.page_bytes_of(index, self.head_size, dtype)
            _ask_for_larger_pages(layer, size)
        self._windows_name = names[0] + SUFFIX
        self._windows = known[self._windows_name] = WindowLayer(
            self.num_kv_heads, self.head_size, dtype, recipe.sink, recipe.recent, page
        )
        # Here and not at the first step: vLLM measures what a model takes before it makes caches.
        heads = layers.rank_heads(artifact.model.kv_heads, self.num_kv_heads)
        device = self.config.device_config.device
        self._transforms = rank_transforms(artifact.layers[index], heads, device, self.folded)
        if self.settings.fold_values and not self.folded:
            raise UnsupportedModelError(
                f"values of {names[0]} were not folded into the weights: their loader "
                f"({self.config.load_config.load_format}) is unknown; leave fold_values out"
            )

    def _require_plain_weights(self) -> None:
        if self.folded:
            raise OscarError(
                "the weights were loaded again without the values that fold_values puts into "
                "them: restart the server, or leave fold_values out"
            )

    def _layer(self, history: Tensor) -> LayerCache:
        """The cache that vLLM bound last. It makes a small one first, to capture graphs and see
        what they take; the windows' layer keeps what is ours of it, and lets go with it."""
        windows = self._windows
        assert windows is not None
        if windows.layer is None:
            windows.layer = self.bind(history, windows.kv_cache)
        return windows.layer

    def bind(self, history: Tensor, windows: Tensor) -> LayerCache:
        """This layer over pages in vLLM's shape: those of its cache, or the canary's own."""
        return layers.bind(
            self.transforms,
            self._memo,
            self.settings.layer_recipe(self._index),
            self.settings.layout_of(self._index, self.head_size, windows.dtype),
            self.scale,
            self.soft_cap,
            history,
            windows,
        )

    @property
    def transforms(self) -> Transforms:
        assert self._transforms is not None, "made when the weights were loaded"
        return self._transforms

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
        # Slots in block 0, vLLM's null block, stand for tokens whose window block was never taken;
        # to the kernels that is page 0, where nothing is written. If blocks have several pages, the
        # others of block 0 are written, and never read: they lie in nobody's window.
        windows = get_forward_context().slot_mapping[self._windows_name][:tokens]
        steps_of(self.config, self.settings, kv_cache.device).writing.write(
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
        steps = steps_of(self.config, self.settings, kv_cache.device)
        step = steps.of_group(attn_metadata.group)
        context = get_forward_context().attn_metadata
        step.plan(attn_metadata, context[self._windows_name].table, cache)
        out = output.view(-1, self.num_heads, self.head_size)
        step.attend(query, key, value, cache, out)
        return output


def _ask_for_larger_pages(layer: Any, size: int) -> None:
    """Of a layer with other bits than the recipe's: bytes of a head."""
    plain = layer.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: Any) -> Any:
        return dataclasses.replace(plain(vllm_config), state_content_bytes=size)

    layer.get_kv_cache_spec = get_kv_cache_spec
