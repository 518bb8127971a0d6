"""`OscarCache`: a Transformers cache that stores packed bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from oscarkv.artifact import Artifact, LayerTransforms, load_artifact
from oscarkv.cache import PagedCache, Step
from oscarkv.codec import PageLayout, RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import CacheError, OscarError
from oscarkv.integrations.transformers.attach import FOLDED, attach, values_are_folded
from oscarkv.integrations.transformers.attention import (
    AttentionHandle,
    HandleLayer,
    LazyMask,
    plain_attention,
)
from oscarkv.integrations.transformers.batch import (
    as_batch,
    left_padding,
    real_tokens,
    window_rows,
)
from oscarkv.kernels import AttentionBackend, LayerCache, Transforms, get_backend
from oscarkv.recipe import Recipe

#: Steps of at most this many tokens a sequence use the backend's `decode`.
DECODE_TOKENS = 8
#: Types of devices that have float64, which packing computes with.
DEVICE_TYPES = ("cpu", "cuda", "xpu")


class OscarCache(Cache):  # type: ignore[misc]
    """A KV cache for `generate()` with a packed history and exact sink and recent windows.

        model, tokenizer = oscarkv.load_model("smollm2")
        cache = oscarkv.OscarCache(model, "smollm2.safetensors")
        model.generate(**tokenizer("Once", return_tensors="pt"), past_key_values=cache)

    Layers the artifact does not cover (sliding windows, by default) keep Transformers' own cache.
    Batches may be padded on the left. `strict` applies the window rule inside prompts as well, so
    that results do not depend on how a prompt is cut; it is meant for measurements. `backend` is
    auto (the fastest for the model's device), cuda, triton or torch.
    """

    def __init__(
        self,
        model: Any,
        artifact: Artifact | str | Path,
        *,
        window_dtype: torch.dtype | str = "auto",
        page_size: int = 64,
        backend: str = "auto",
        strict: bool = False,
    ) -> None:
        if not isinstance(artifact, Artifact):
            artifact = load_artifact(artifact)
        self.backend = choose_backend(backend, model.device)
        attach(model, artifact)
        self.recipe, self.strict = artifact.recipe, strict
        dtype = next(model.parameters()).dtype if window_dtype == "auto" else window_dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        if self.recipe.exact:
            dtype = torch.bfloat16
        layers = DynamicCache(config=model.config).layers
        self._packed: list[OscarLayer] = []
        for index, transforms in sorted(artifact.layers.items()):
            layer = OscarLayer(
                self,
                make_layer(
                    transforms,
                    artifact.layer_recipe(index),
                    page_size,
                    dtype,
                    model.device,
                    values_are_folded(model),
                ),
                sliding_window=getattr(layers[index], "sliding_window", None),
            )
            self._packed.append(layer)
            layers[index] = layer
        self.pages = PagedCache(
            [layer.store for layer in self._packed],
            sink=self.recipe.sink,
            recent=_recent(self.recipe),
            page_size=page_size,
            keep_history=not self.recipe.exact,
        )
        self._length = 0  # tokens a sequence, padding included
        self._padding: list[int] = []
        self._step: Step | None = None
        #: Called with (layer, output, exact output) after each prompt that is read whole; for
        #: measurements, since it computes attention twice.
        self.observer: Callable[[int, Tensor, Tensor], None] | None = None
        super().__init__(layers=layers)

    # -- a step ------------------------------------------------------------------------------

    def step(self, layer: OscarLayer, batch: int, new: int, padding: Tensor | None) -> Step:
        """The step's pages; the first layer to ask makes them."""
        if layer.seen - new == self._length:
            try:
                self._take_padding(batch, new, padding)
                counts = [min(new, max(0, layer.seen - pad)) for pad in self._padding]
                self._step = self.pages.append(counts)
            except CacheError:
                layer.seen = self._length  # nothing was taken in: the cache can be used on
                raise
            self._length = layer.seen
            step = self._step
            self.backend.plan(
                step.seq_lens,
                step.query_start_loc,
                step.history_table,
                step.window_table,
                self.strict,
                step.max_query_len,
            )
        if self._step is None or layer.seen != self._length:
            raise CacheError(
                "an earlier pass through the model was broken off, and its layers hold different "
                "tokens; reset() the cache or make a new one"
            )
        return self._step

    def after(self, layer: OscarLayer) -> None:
        """Once the last layer has read the step, let go of what only the step itself needed."""
        if layer is self._packed[-1]:
            self.pages.trim()

    def _take_padding(self, batch: int, new: int, mask: Tensor | None) -> None:
        """Learn each sequence's padding from the attention mask; refuse what changed since."""
        if self._padding and len(self._padding) != batch:
            raise CacheError(
                f"the cache holds {len(self._padding)} sequences, this batch has {batch}; "
                "use a new OscarCache for another batch"
            )
        begun = [pad < self._length for pad in self._padding]
        if new == 1 and all(begun) and begun:
            return  # generate() only ever appends ones
        if mask is None and any(self._padding):
            raise CacheError(
                "the cache holds a padded batch, but there is no attention mask; pass the mask of "
                "all tokens so far"
            )
        padding = left_padding(mask, batch, self._length + new)
        for index, started in enumerate(begun):
            if started and padding[index] != self._padding[index]:
                raise CacheError(
                    f"the attention mask pads sequence {index} by {padding[index]} tokens, it was "
                    f"{self._padding[index]} before; use a new OscarCache for another batch"
                )
        if not self._padding:
            self.pages.add(batch)
        self._padding = padding

    def holds_back(self, new: int) -> bool:
        """Whether a step's codes may wait: single tokens, long before they leave the window."""
        return (
            new == 1
            and self.backend.write_batch > 1
            and not self.recipe.exact
            and self.recipe.recent >= 2 * self.backend.write_batch
        )

    @property
    def padding(self) -> list[int]:
        return self._padding

    # -- what generate() does to a cache -------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())
        for layer in self._stock_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(len(self._padding)) for _ in range(repeats)])
        for layer in self._stock_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        self._select(indices.tolist())
        for layer in self._stock_layers():
            layer.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop -n tokens from the end (or, as Transformers did once, keep the first n)."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding hands over a tensor
        if tokens_to_remove > 0:
            length = min(tokens_to_remove, self._length)
        else:
            length = self._length + tokens_to_remove
        if length < 0:
            raise CacheError(f"cannot remove {-tokens_to_remove} of {self._length} tokens")
        for layer in self._stock_layers():  # first: they may refuse
            layer.crop(tokens_to_remove)
        self._pack_held()
        for index, pad in enumerate(self._padding):
            self.pages.truncate(index, max(0, length - pad))
        self._length = length
        for layer in self._packed:
            layer.seen = length

    def reset(self) -> None:
        """Forget everything; the cache can take another batch."""
        self.pages.reorder([])
        self._length, self._padding, self._step = 0, [], None
        for layer in self._packed:
            layer.seen = 0
            layer.forget_held()
        for layer in self._stock_layers():
            layer.reset()
            if isinstance(layer, DynamicLayer):  # reset() only zeroes them, at their old length
                layer.keys = layer.values = None
                layer.is_initialized = False

    def _pack_held(self) -> None:
        """Complete the history pages, before sequences come to share them or lose their ends."""
        for layer in self._packed:
            layer.pack_held()

    def _select(self, indices: list[int]) -> None:
        self._pack_held()
        self.pages.reorder(indices)
        self._padding = [self._padding[i] for i in indices]

    def _stock_layers(self) -> list[CacheLayerMixin]:
        return [layer for layer in self.layers if not isinstance(layer, OscarLayer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarCache:
        """A copy that goes its own way; compiled kernels cannot be copied, so it starts its own."""
        if self.backend.name != "torch":
            memo[id(self.backend)] = get_backend(self.backend.name, self.pages.device)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()})
        return made

    # -- memory ------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes held for keys and values: packed pages, exact windows, tables, stock layers."""
        held = sum(layer.held_bytes() for layer in self._packed)
        return (
            self.pages.nbytes() + held + sum(_stock_bytes(layer) for layer in self._stock_layers())
        )

    def bits_per_element(self, window_bytes: int | None = None) -> float:
        """Bits actually held per cached element of the packed layers, slack and tables included.

        `window_bytes` counts windows as if their elements had that size (2: as in serving).
        """
        layers = self.pages.layers
        elements = sum(2 * s.kv_heads * s.layout.head_dim for s in layers) * sum(self.pages.lengths)
        held = self.pages.nbytes()
        if window_bytes is not None:
            held += sum(s.window.numel() * (window_bytes - s.window.itemsize) for s in layers)
        return 8 * held / max(elements, 1)


class OscarLayer(HandleLayer):
    """One packed layer of an OscarCache."""

    is_croppable = True

    def __init__(self, cache: OscarCache, store: LayerCache, sliding_window: int | None) -> None:
        super().__init__()
        self.cache, self.store = cache, store
        self.store.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # keys, values, history slots

    def hold(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store one token's exact copies now, and its codes with those of the next few."""
        nowhere = torch.full_like(step.history_slots, -1)
        self.cache.backend.write(k, v, nowhere, step.window_slots, self.store)
        self._held.append((k, v, step.history_slots))
        if len(self._held) >= self.cache.backend.write_batch:
            self.pack_held()

    def pack_held(self) -> None:
        """Pack the tokens whose codes are still to be written."""
        if self._held:
            k, v, slots = (torch.cat(parts) for parts in zip(*self._held, strict=True))
            self.cache.backend.write(k, v, slots, torch.full_like(slots, -1), self.store)
            self._held.clear()

    def forget_held(self) -> None:
        self._held.clear()

    def held_bytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v, _ in self._held)

    def handle(self, k: Tensor, v: Tensor) -> AttentionHandle:
        return _Handle(self, k, v)


class _Handle(AttentionHandle):
    """New keys and values of one layer, on their way into the cache: [B, H, n, d]."""

    def __init__(self, layer: OscarLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v

    def attend(
        self, module: nn.Module, query: Tensor, mask: LazyMask | Tensor | None, **arguments: Any
    ) -> Tensor:
        layer, cache = self.layer, self.layer.cache
        batch, _, new, _ = query.shape
        store = layer.store
        if isinstance(mask, Tensor):
            layer.seen -= new
            raise CacheError(
                "OscarCache is causal and takes 2D attention masks [batch, tokens] only, not a "
                f"ready mask of shape {list(mask.shape)}"
            )
        # Not getattr: where there is none, a module looks through all it consists of.
        if module.__dict__.get(FOLDED, False) != (store.transforms.value is None):
            layer.seen -= new
            raise CacheError(
                "values were folded into the model's weights, or unfolded, after this cache was "
                "made; make a new OscarCache"
            )
        store.scale = arguments.pop("scaling")
        store.soft_cap = arguments.get("softcap")
        padding = mask.padding if isinstance(mask, LazyMask) else None
        step = cache.step(layer, batch, new, padding)
        with _full_precision(query.device.type):
            result = self._write_and_read(module, query, mask, step, arguments)
        cache.after(layer)
        return result

    def _write_and_read(
        self,
        module: nn.Module,
        query: Tensor,
        mask: LazyMask | None,
        step: Step,
        arguments: dict[str, Any],
    ) -> Tensor:
        layer, cache = self.layer, self.layer.cache
        store, (batch, _, new, _) = layer.store, query.shape
        q, k, v = (real_tokens(x, cache.padding, layer.seen) for x in (query, self.k, self.v))
        if cache.holds_back(new):
            layer.hold(k, v, step)
        else:
            layer.pack_held()
            cache.backend.write(k, v, step.history_slots, step.window_slots, store)

        # Where every key is exact, do what the stock cache would do, to the bit.
        first = layer.seen == new
        if not store.soft_cap:
            if first and not cache.strict:
                return plain_attention(
                    module, query, self.k, self.v, mask, store.scale, **arguments
                )
            if layer.seen - min(cache.padding) <= store.sink + store.recent:
                keys, values = window_rows(step, store, cache.padding, layer.seen)
                keys, values = keys.to(query.dtype), values.to(query.dtype)
                return plain_attention(module, query, keys, values, mask, store.scale, **arguments)

        out = q.new_empty(q.shape)  # in a row, whatever q's strides
        if new <= DECODE_TOKENS and not first:
            cache.backend.decode(q, store, out)
        else:
            cache.backend.prefill(q, k, v, store, out)
        result = as_batch(out, batch, new, cache.padding, layer.seen)
        if first and cache.observer is not None:
            exact = plain_attention(module, query, self.k, self.v, mask, store.scale, **arguments)
            cache.observer(int(module.layer_idx), result, exact)  # type: ignore[arg-type]
        return result


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """A fresh backend for tensors on a device."""
    if device.type not in DEVICE_TYPES:
        why = "has no float64, which packing needs" if device.type == "mps" else "is not supported"
        raise OscarError(
            f"the model is on {device.type}, which {why}: use the CPU (model.to('cpu'), "
            "--device cpu) or a CUDA GPU"
        )
    backend = get_backend(name, device)
    if device.type == "cpu" and backend.name != "torch":
        raise OscarError(
            f"the {backend.name} backend needs the model on a GPU, but it is on the CPU; move the "
            "model there, or take the torch backend (auto does)"
        )
    return backend


def _full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Mixed precision would round transforms and codes; the model's own dtypes are kept."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def make_layer(
    transforms: LayerTransforms,
    recipe: Recipe,
    page_size: int,
    window_dtype: torch.dtype,
    device: torch.device,
    values_folded: bool,
) -> LayerCache:
    """An empty layer: constants on the device, pools with only their page 0."""
    heads, dim = transforms.key_mean.shape
    two = {"key_bits": 2, "value_bits": 2, "refine_keys": False}
    stored = recipe.replace(**two) if recipe.exact else recipe
    layout = PageLayout.of(stored, dim, page_size)
    moved = {name: tensor.to(device) for name, tensor in transforms.tensors().items()}
    return LayerCache(
        history=torch.zeros(1, heads, layout.bytes, dtype=torch.uint8, device=device),
        window=torch.zeros(1, heads, 2, PAGE_QUANTUM, dim, dtype=window_dtype, device=device),
        transforms=Transforms(
            key=moved["key"],
            query=moved["query"],
            key_mean=moved["key_mean"],
            value=None if values_folded else moved["value"],
            value_inverse=None if values_folded else moved["value_inverse"],
            value_mean=None if values_folded else moved["value_mean"],
            exponents=moved["exponents"],
            metric=moved.get("metric"),
        ),
        layout=layout,
        key_codec=RowCodec.for_keys(stored, dim),
        value_codec=RowCodec.for_values(stored, dim),
        sink=recipe.sink,
        recent=_recent(recipe),
        scale=dim**-0.5,
    )


def _recent(recipe: Recipe) -> int:
    """An exact recipe keeps every token in the window."""
    return 1 << 30 if recipe.exact else recipe.recent


def _stock_bytes(layer: CacheLayerMixin) -> int:
    """Bytes of a stock layer; a sliding one may show a window of more than that."""
    held: list[Any] = []
    for value in vars(layer).values():
        held += value.values() if isinstance(value, dict) else [value]
    return sum(x.untyped_storage().nbytes() for x in held if isinstance(x, Tensor))
