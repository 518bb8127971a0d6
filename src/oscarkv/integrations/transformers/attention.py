"""The attention function that Transformers calls once a model is attached.

Registered as `oscarkv`. Keys that come from an `OscarCache` are handles, and the handle attends;
anything else (stock caches, no cache) goes to SDPA, so an attached model still works as before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oscarkv.errors import CacheError, UnsupportedModelError

NAME = "oscarkv"
#: Called with (module, q, k, v, output, scale, kwargs) by every plain attention call.
Observer = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, float, dict[str, Any]], None]
_observers: list[Observer] = []


class LazyMask:
    """A mask that is built only if someone needs it: an OscarCache knows causality by itself."""

    ndim = 4  # to Transformers, it is a ready mask [batch, 1, queries, keys]

    def __init__(self, **arguments: Any) -> None:
        self.padding: Tensor | None = arguments.get("attention_mask")
        self._arguments = arguments
        self._masks: dict[int, Tensor | None] = {}

    def contiguous(self) -> LazyMask:
        """generate() asks this of masks it made for a static cache."""
        return self

    def dense(self, keys: int) -> Tensor | None:
        """The mask over the last `keys` keys: layers of one kind share a mask, but a packed one
        shows all its keys where a stock sliding one shows its window."""
        if keys not in self._masks:
            arguments = dict(self._arguments)
            if keys != arguments["kv_length"]:
                end = arguments["q_offset"] + arguments["q_length"]
                arguments |= {"kv_length": keys, "kv_offset": end - keys}
            self._masks[keys] = sdpa_mask(**arguments)
        return self._masks[keys]


def make_mask(**arguments: Any) -> LazyMask:
    """Transformers' mask interface. generate() makes masks for static caches itself, and hands
    them to the model, which asks again."""
    mask = arguments.get("attention_mask")
    return mask if isinstance(mask, LazyMask) else LazyMask(**arguments)


class AttentionHandle(ABC):
    """What an OscarCache layer returns in place of keys: it will write and attend."""

    @abstractmethod
    def attend(
        self, module: nn.Module, query: Tensor, mask: LazyMask | Tensor | None, **arguments: Any
    ) -> Tensor: ...

    def __getattr__(self, name: str) -> Any:
        # Another attention function took this for keys.
        raise CacheError(
            "this model's attention no longer goes through oscarkv (it was detached, or given "
            "another attn_implementation); make a new OscarCache, which attaches it again"
        )


class HandleLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a Transformers cache that answers new keys and values with a handle."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # tokens a sequence, padding included

    @abstractmethod
    def handle(self, k: Tensor, v: Tensor) -> AttentionHandle: ...

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[AttentionHandle, AttentionHandle]:
        handle = self.handle(key_states, value_states)
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        return handle, handle

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | AttentionHandle,
    value: Tensor | AttentionHandle,
    attention_mask: LazyMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [B, H, n, d] -> output [B, n, H, d]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has learned attention sinks, which are not supported yet"
        )
    if isinstance(key, AttentionHandle):
        return key.attend(module, query, attention_mask, scaling=scale, **kwargs), None
    assert not isinstance(value, AttentionHandle)
    output = plain_attention(
        module, query, key, value, attention_mask, scale, dropout=dropout, **kwargs
    )
    for observer in _observers:
        observer(module, query, key, value, output, scale, kwargs)
    return output, None


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: LazyMask | Tensor | None,
    scale: float,
    **kwargs: Any,
) -> Tensor:
    """What a stock model computes, with SDPA."""
    if kwargs.get("softcap"):
        raise UnsupportedModelError(
            f"{type(module).__name__} caps its logits, which SDPA cannot do; such models are not "
            "supported in Transformers yet"
        )
    dense = mask.dense(key.shape[2]) if isinstance(mask, LazyMask) else mask
    output, _ = sdpa_attention_forward(module, query, key, value, dense, scaling=scale, **kwargs)
    return output


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have every plain attention call of attached models reported."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def attention_implementation(model: Any) -> Iterator[None]:
    """Route a model's attention through this module for a while."""
    before = model.config._attn_implementation
    route(model)
    try:
        yield
    finally:
        if before != NAME:
            model.set_attn_implementation(before)


def route(model: Any) -> None:
    """Route a model's attention through this module."""
    if not getattr(model, "_supports_sdpa", True):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention in a way of its own (Transformers offers "
            "no SDPA for it); it is not supported"
        )
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use Transformers' attention interface"
        )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
