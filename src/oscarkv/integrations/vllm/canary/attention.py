"""Attention of a whole sequence that is in no cache: full precision, or packed as it is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.serving.windows import blocks_for
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.impl import OscarImpl
from oscarkv.integrations.vllm.settings import Settings, page_layout
from oscarkv.kernels import get_backend

#: Queries whose logits are held at a time.
QUERY_BLOCK = 256


class Exact:
    """Keys and values as the model makes them. Compares the keys with those of the calibration."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ratios: list[Tensor] = []

    def attend(
        self, layer: Attention, impl: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        attend_exactly(layer, impl, q, k, v, out)
        if isinstance(impl, OscarImpl):
            self._ratios.append(self._energy_ratio(layer.layer_name, impl, k))

    def _energy_ratio(self, name: str, impl: OscarImpl, k: Tensor) -> Tensor:
        """Mean square of the stored keys k' = (k - m) A over that in the calibration, averaged
        over heads: both a mean that moved and a spread that changed show in it."""
        artifact, transforms = self.settings.loaded, impl.transforms
        heads = layers.rank_heads(artifact.model.kv_heads, impl.num_kv_heads)
        expected = artifact.layers[extract_layer_index(name)].spectrum[heads].sum(-1).to(k.device)
        # The sink is never packed, and its keys are like no others.
        rows = k[min(self.settings.recipe.sink, k.shape[0] - 1) :].float().transpose(0, 1)
        stored = (rows - transforms.key_mean[:, None]) @ transforms.key
        ratios = stored.square().sum(-1).mean(-1) / expected
        return ratios[expected > 0].mean()  # 0: the artifact does not know

    def drift(self) -> float | None:
        """The largest factor, up or down, between a layer's keys and the calibration's."""
        known = [ratio for ratio in torch.stack(self._ratios).tolist() if ratio > 0]
        return max((max(ratio, 1 / ratio) for ratio in known), default=None)


class Packed:
    """Every query reads what a decoded token at its position reads: the kernels that serve, over
    pages of our own, which the layers use one after the other."""

    def __init__(
        self, settings: Settings, tokens: int, head_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.page = page_layout(settings.recipe, head_dim, dtype).page_size
        self.blocks = 1 + blocks_for(tokens)  # block 0 stands for "none"
        self.backend = get_backend(settings.backend, device)
        positions = torch.arange(tokens, device=device)
        self.history_slots, self.window_slots = positions + self.page, positions + PAGE_QUANTUM

        def table(size: int) -> Tensor:
            last = blocks_for(tokens, size)
            return torch.arange(1, last + 1, dtype=torch.int32, device=device)[None]

        length = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.backend.plan(
            length[1:], length, table(self.page), table(PAGE_QUANTUM), True, max_query_len=tokens
        )

    def attend(
        self, layer: Attention, impl: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        if not isinstance(impl, OscarImpl):  # keeps vLLM's own cache
            attend_exactly(layer, impl, q, k, v, out)
            return
        size = window_page_bytes(impl.head_size, k.dtype)
        pages = torch.zeros(
            2, self.blocks, impl.num_kv_heads, 1, size, dtype=torch.uint8, device=k.device
        )
        cache = impl.bind(pages[0], pages[1].view(k.dtype))
        self.backend.write(k, v, self.history_slots, self.window_slots, cache)
        self.backend.prefill(q, k, v, cache, out)


class _StandIn:
    """In the place of a layer's implementation."""

    def __init__(self, impl: Any, attention: Exact | Packed) -> None:
        self.impl, self.attention = impl, attention

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **others: Any,
    ) -> Tensor:
        shape = (-1, self.impl.num_heads, self.impl.head_size)
        self.attention.attend(layer, self.impl, query, key, value, output.view(shape))
        return output


@contextmanager
def attending(config: Any, attention: Exact | Packed) -> Iterator[None]:
    """Have every layer attend so. vLLM's caches are neither read nor written meanwhile."""
    known = config.compilation_config.static_forward_context
    impls = {name: layer.impl for name, layer in known.items() if hasattr(layer, "impl")}
    for name in impls:
        if not is_plain(known[name]):
            raise OscarError(f"{name} is no plain attention")
    try:
        for name, impl in impls.items():
            known[name].impl = _StandIn(impl, attention)
        yield
    finally:
        for name, impl in impls.items():
            known[name].impl = impl


def is_plain(layer: Any) -> bool:
    """Whether `exact_attention` is what a layer does."""
    return (
        type(layer) is Attention
        and layer.attn_type == AttentionType.DECODER
        and layer.kv_sharing_target_layer_name is None
        and layer.head_size == layer.head_size_v
        and not layer.has_sink
        and getattr(layer.impl, "alibi_slopes", None) is None
    )


def attend_exactly(
    layer: Attention, impl: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> None:
    cap = getattr(impl, "soft_cap", None) or getattr(impl, "logits_soft_cap", None) or None
    out.copy_(exact_attention(q, k, v, impl.scale, cap, layer.sliding_window))


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, soft_cap: float | None, window: int | None
) -> Tensor:
    """Causal attention of one sequence: q [n, heads, d], k and v [n, KV heads, d]; in fp32."""
    heads = k.shape[1]
    keys, values = k.float().permute(1, 2, 0)[:, None], v.float().transpose(0, 1)[:, None]
    positions = torch.arange(q.shape[0], device=q.device)
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        queries = q[rows].float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, n, d]
        logits = queries @ keys * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        age = positions[rows, None] - positions
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[rows] = (weights @ values).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out
