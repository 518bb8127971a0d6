"""Published methods that are measured but not packed: functions on dense keys and values.

A method whose codes do not fit the packed format (groups along tokens, codebooks, sparse outliers,
keys before RoPE) can still be compared: `oscarkv eval fidelity` rounds the history with it, in the
same windows and on the same tokens as a packed recipe. It can be neither calibrated into an
artifact nor served; `Recipe.named` refuses its name.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from oscarkv.recipe import EXACT_BITS, Recipe

_WINDOWS = Recipe()  # for comparison, everyone gets the windows that our recipes have


class Quantizer(Protocol):
    """One layer's rounding: what a reader of the history would see, fp32 [heads, tokens, d]."""

    def keys(self, keys: Tensor) -> Tensor: ...

    def values(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Some KV heads and sides of a layer's rounding; the rest of it is exact."""

    inner: Quantizer
    heads: tuple[int, ...] | None  # None: all
    sides: tuple[str, ...]

    def keys(self, keys: Tensor) -> Tensor:
        return self._mix(keys, self.inner.keys(keys)) if "keys" in self.sides else keys

    def values(self, values: Tensor) -> Tensor:
        return self._mix(values, self.inner.values(values)) if "values" in self.sides else values

    def _mix(self, exact: Tensor, rounded: Tensor) -> Tensor:
        if self.heads is None:
            return rounded
        mixed = exact.clone()
        mixed[list(self.heads)] = rounded[list(self.heads)]
        return mixed


@dataclass(frozen=True)
class LayerSamples:
    """Keys and values of one layer on calibration text, fp32 [heads, tokens, d].

    `keys` are as the method wants them, before or after RoPE. The gradients are those of the
    model's loss; None unless the method asked for them.
    """

    layer: int
    keys: Tensor
    values: Tensor
    key_gradients: Tensor | None = None
    value_gradients: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and head_dim."""
        return self.keys.shape[0], self.keys.shape[2]


@dataclass(frozen=True, kw_only=True)
class Simulation(ABC):
    """A method's knobs. The exact windows are those of our recipes, unless it stands alone."""

    name: str
    sink: int = _WINDOWS.sink
    recent: int = _WINDOWS.recent

    #: The windows of the method's own paper: sink, recent (the query's own token included).
    own_windows: ClassVar[tuple[int, int]] = (0, 1)
    #: Tokens that share parameters, and so leave the recent window together.
    token_group: ClassVar[int] = 1
    #: Whether keys are rounded before RoPE turns them.
    before_rope: ClassVar[bool] = False
    #: What `fit` looks at: nothing, "samples", or "gradients" (samples with gradients).
    needs: ClassVar[str] = ""

    @abstractmethod
    def fit(self, samples: LayerSamples) -> Quantizer:
        """The quantizer of one layer; without `needs`, the samples hold no tokens."""

    @abstractmethod
    def history_bits(self, heads: int, dim: int) -> float:
        """Bits an element of the history, everything that must be stored with it included."""

    def alone(self) -> Simulation:
        """The method as its paper runs it, with its own windows."""
        sink, recent = self.own_windows
        return dataclasses.replace(self, name=f"{self.name}-alone", sink=sink, recent=recent)

    def bits(self, heads: int, dim: int, length: int = 131072) -> float:
        """Bits an element at a context length, as `Recipe.bits` counts them. A group of tokens
        stays exact until all of them have left the window: half a group, on average."""
        waiting = (self.token_group - 1) / 2
        exact = min(self.sink + self.recent + waiting, length) / length
        return self.history_bits(heads, dim) * (1 - exact) + EXACT_BITS * exact


def round_uniform(x: Tensor, bits: int) -> Tensor:
    """Asymmetric min/max rounding along the last dimension, parameters stored as fp16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    top = (1 << bits) - 1
    scale = ((high - low) / top).clamp_min(2.0**-24).half().float()
    low = low.half().float()
    return torch.round((x - low) / scale).clamp(0, top) * scale + low
