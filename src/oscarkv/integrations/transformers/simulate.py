"""A cache that packs nothing: it rounds each layer's history and attends as a packed one would.

For measurements only: one sequence, read whole, every query by the window rule (`strict`).

    query t reads    keys < sink | sink .. f(t) - 1 rounded | f(t) .. t exact

f(t) = t - recent + 1, down to a whole group of tokens where tokens share parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from oscarkv.errors import CacheError, UnsupportedModelError
from oscarkv.integrations.transformers.attention import (
    AttentionHandle,
    HandleLayer,
    LazyMask,
    attention_implementation,
    observing,
    plain_attention,
)
from oscarkv.integrations.transformers.geometry import describe, rope_at
from oscarkv.methods.simulation import LayerSamples, Quantizer, Simulation
from oscarkv.recipe import EXACT_BITS

#: Queries of one sequence that are handled at a time.
QUERY_BLOCK = 512


@dataclass(frozen=True)
class Windows:
    sink: int
    recent: int
    token_group: int = 1
    bits: int = EXACT_BITS  # of what the windows hold; 8: FP8 (e4m3)

    def held(self, rows: Tensor) -> Tensor:
        """Keys or values as the windows hold them."""
        return rows if self.bits == EXACT_BITS else rows.to(torch.float8_e4m3fn).to(rows.dtype)

    def frontier(self, query: Tensor) -> Tensor:
        """f(t): the first key after the sink that is exact for the query at t."""
        old = (query - self.recent + 1 - self.sink).clamp_min(0)
        return self.sink + old // self.token_group * self.token_group


class SimulatedCache(Cache):  # type: ignore[misc]
    """Rounds the history of some layers; the others keep Transformers' own cache."""

    def __init__(self, model: Any, quantizers: Mapping[int, Quantizer], windows: Windows) -> None:
        self.windows = windows
        #: Called with (layer, output, exact output), as OscarCache's.
        self.observer: Callable[[int, Tensor, Tensor], None] | None = None
        layers = DynamicCache(config=model.config).layers
        for index, quantizer in quantizers.items():
            layers[index] = _Layer(self, quantizer)
        super().__init__(layers=layers)


class _Layer(HandleLayer):
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: SimulatedCache, quantizer: Quantizer) -> None:
        super().__init__()
        self.cache, self.quantizer = cache, quantizer

    def handle(self, k: Tensor, v: Tensor) -> AttentionHandle:
        if self.seen or k.shape[0] != 1:
            raise CacheError(
                "a simulated method is measured on one sequence, read whole; it cannot generate"
            )
        return _Handle(self, k, v)


class _Handle(AttentionHandle):
    def __init__(self, layer: _Layer, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v

    def attend(
        self, module: nn.Module, query: Tensor, mask: LazyMask | Tensor | None, **arguments: Any
    ) -> Tensor:
        if arguments.get("softcap"):
            raise UnsupportedModelError("simulated methods are not measured on capped logits")
        scale = arguments.pop("scaling")
        cache = self.layer.cache
        out = rounded_attention(
            query[0].float(),
            self.k[0].float(),
            self.v[0].float(),
            self.layer.quantizer,
            cache.windows,
            scale,
        )
        result = out.transpose(0, 1)[None].to(query.dtype)
        if cache.observer is not None:
            exact = plain_attention(module, query, self.k, self.v, mask, scale, **arguments)
            cache.observer(int(module.layer_idx), result, exact)  # type: ignore[arg-type]
        return result


def rounded_attention(
    q: Tensor, k: Tensor, v: Tensor, quantizer: Quantizer, windows: Windows, scale: float
) -> Tensor:
    """Causal attention over fp32 q [Hq, T, d], k, v [H, T, d] with the history rounded."""
    heads, length, _ = k.shape
    sink = min(windows.sink, length)
    old_k, old_v = k, v
    if int(windows.frontier(torch.tensor(length - 1))) > sink and length > sink:
        old_k = torch.cat([k[:, :sink], quantizer.keys(k[:, sink:])], 1)
        old_v = torch.cat([v[:, :sink], quantizer.values(v[:, sink:])], 1)
    k, v = windows.held(k), windows.held(v)
    grouped = q.unflatten(0, (heads, -1))  # [H, readers, T, d]
    readers = grouped.shape[1]
    out = torch.empty_like(grouped)
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        t = torch.arange(start, stop, device=q.device)
        frontier = windows.frontier(t)
        # The sink, what some of these queries read rounded, and what some of them read exactly.
        parts = (0, min(sink, stop)), (sink, int(frontier[-1])), (int(frontier[0]), stop)
        spans = [slice(low, max(low, min(high, stop))) for low, high in parts]
        j_sink, j_old, j_new = (
            torch.arange(span.start, span.stop, device=q.device) for span in spans
        )
        visible = torch.cat(
            [
                j_sink <= t[:, None],
                j_old < frontier[:, None],
                (j_new >= frontier[:, None]) & (j_new <= t[:, None]),
            ],
            1,
        )
        keys = torch.cat([k[:, spans[0]], old_k[:, spans[1]], k[:, spans[2]]], 1)
        values = torch.cat([v[:, spans[0]], old_v[:, spans[1]], v[:, spans[2]]], 1)
        rows = grouped[:, :, start:stop].flatten(1, 2)
        block = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], visible.repeat(readers, 1), scale=scale
        )
        out[:, :, start:stop] = block[0].unflatten(1, (readers, -1))
    return out.flatten(0, 1)


# -- fitting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BeforeRope:
    """Rounds keys as they are before RoPE, and turns them again."""

    inner: Quantizer
    model: Any
    layer: int
    sink: int

    def keys(self, keys: Tensor) -> Tensor:
        positions = torch.arange(self.sink + keys.shape[1])
        rope = rope_at(self.model, self.layer, positions)
        if rope is None:
            return self.inner.keys(keys)
        blank = keys.new_zeros(keys.shape[0], self.sink, keys.shape[2])  # RoPE starts at 0
        plain = rope.turn(torch.cat([blank, keys], 1), back=True)[:, self.sink :]
        rounded = torch.cat([blank, self.inner.keys(plain)], 1)
        return rope.turn(rounded)[:, self.sink :]

    def values(self, values: Tensor) -> Tensor:
        return self.inner.values(values)


def fit_simulation(
    model: Any, method: Simulation, sequences: list[Tensor], layers: list[int]
) -> dict[int, Quantizer]:
    """A method's quantizers, fitted to calibration sequences [1, T] where it needs any."""
    identity = describe(model).identity
    device = next(model.parameters()).device
    if method.needs:
        samples = collect_samples(
            model,
            sequences,
            layers,
            before_rope=method.before_rope,
            gradients=method.needs == "gradients",
        )
    else:
        nothing = torch.empty(identity.kv_heads, 0, identity.head_dim, device=device)
        samples = {layer: LayerSamples(layer, nothing, nothing) for layer in layers}
    fitted: dict[int, Quantizer] = {}
    for layer in layers:
        quantizer = method.fit(samples.pop(layer))
        before = method.before_rope
        fitted[layer] = _BeforeRope(quantizer, model, layer, method.sink) if before else quantizer
    return fitted


def collect_samples(
    model: Any, sequences: list[Tensor], layers: list[int], *, before_rope: bool, gradients: bool
) -> dict[int, LayerSamples]:
    """Keys and values of calibration sequences, and the gradients of the loss with them."""
    found: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in layers}
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:  # only the keys' and values' gradients are wanted
        parameter.requires_grad_(False)
    for sequence in sequences:
        sequence = sequence.to(device)
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def observe(
            module: nn.Module,
            _q: Tensor,
            k: Tensor,
            v: Tensor,
            *_rest: Any,
            seen: dict[int, tuple[Tensor, Tensor]] = seen,
        ) -> None:
            layer = getattr(module, "layer_idx", None)
            if layer in found:
                if gradients:
                    k.retain_grad()
                    v.retain_grad()
                seen[int(layer)] = (k, v)

        with attention_implementation(model), observing(observe), torch.set_grad_enabled(gradients):
            if gradients:
                embedded = model.get_input_embeddings()(sequence).detach().requires_grad_()
                model(inputs_embeds=embedded, labels=sequence, use_cache=False).loss.backward()
            else:
                model.base_model(input_ids=sequence, use_cache=False)
        for layer, (k, v) in seen.items():
            kept = [k, v, k.grad, v.grad] if gradients else [k, v]
            rows = [x[0].detach().float() for x in kept if x is not None]
            if before_rope:
                rope = rope_at(model, layer, torch.arange(k.shape[2]))
                if rope is not None:  # a rotation turns gradients as it turns keys
                    for index in (0, 2)[: len(rows) // 2]:
                        rows[index] = rope.turn(rows[index], back=True)
            found[layer].append(tuple(rows))
    for parameter in trained:
        parameter.requires_grad_(True)
    return {
        layer: LayerSamples(layer, *(torch.cat(part, 1) for part in zip(*parts, strict=True)))
        for layer, parts in found.items()
    }
