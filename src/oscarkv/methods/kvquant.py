"""KVQuant (Hooper et al., NeurIPS 2024, arXiv 2401.18079): nuq3 with 1 % of outliers kept apart.

Keys are rounded before RoPE and per channel, with ranges fixed by calibration; values per token,
with ranges found as they come. What is outside the middle 99 % is kept exactly, as sparse 16-bit
numbers. The rest is scaled to [-1, 1] and rounded to eight levels that are not evenly spaced: one
set a layer for keys and one for values, by k-means weighted with the squared gradients of the loss
(the diagonal of the Fisher information). The first token stays exact.

Departures: outliers of values are the largest and smallest 0.5 % of a token over all its heads, as
published, but at least one of each; the k-means runs on at most 100,000 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oscarkv.methods.simulation import LayerSamples, Simulation

#: Outliers are stored as a 16-bit value and a 16-bit index each.
OUTLIER_BITS = 32
KMEANS_SAMPLES = 100_000


@dataclass(frozen=True, kw_only=True)
class KVQuant(Simulation):
    bits_per_code: int = 3
    outliers: float = 0.01

    own_windows: ClassVar[tuple[int, int]] = (1, 1)
    before_rope: ClassVar[bool] = True
    needs: ClassVar[str] = "gradients"

    def fit(self, samples: LayerSamples) -> _Rounding:
        assert samples.key_gradients is not None
        assert samples.value_gradients is not None
        low = _quantile(samples.keys, self.outliers / 2)
        high = _quantile(samples.keys, 1 - self.outliers / 2)
        side = _outliers_a_side(samples, self.outliers)
        count = 1 << self.bits_per_code
        scaled, inside = _scale(samples.keys, low, high)
        key_levels = weighted_levels(scaled[inside], samples.key_gradients[inside], count)
        scaled, inside = _scale(samples.values, *_token_range(samples.values, side))
        value_levels = weighted_levels(scaled[inside], samples.value_gradients[inside], count)
        return _Rounding(low, high, side, key_levels, value_levels)

    def history_bits(self, heads: int, dim: int) -> float:
        values_kept = 2 * max(1, round(self.outliers / 2 * heads * dim)) / (heads * dim)
        kept = (self.outliers + values_kept) / 2
        ranges = 32 / (heads * dim) / 2  # of values; those of keys are the layer's
        return self.bits_per_code + OUTLIER_BITS * kept + ranges


@dataclass(frozen=True)
class _Rounding:
    low: Tensor  # [H, 1, d]: range of every key channel
    high: Tensor
    side: int  # outliers at either end of a token's values
    key_levels: Tensor
    value_levels: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        return _round(keys, self.low, self.high, self.key_levels)

    def values(self, values: Tensor) -> Tensor:
        low, high = (x.half().float() for x in _token_range(values, self.side))
        return _round(values, low, high, self.value_levels)


def _quantile(keys: Tensor, share: float) -> Tensor:
    """Of every channel over tokens; kthvalue, since torch.quantile refuses large inputs."""
    index = min(max(round(share * keys.shape[1]), 1), keys.shape[1])
    return keys.kthvalue(index, dim=1, keepdim=True).values


def _outliers_a_side(samples: LayerSamples, share: float) -> int:
    heads, dim = samples.shape
    return max(1, round(share / 2 * heads * dim))


def _token_range(values: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each token that is not an outlier, over heads: [1, T, 1]."""
    by_token = values.transpose(0, 1).flatten(1).sort(-1).values
    return by_token[:, side, None][None], by_token[:, -1 - side, None][None]


def _scale(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """x with [low, high] mapped to [-1, 1], and which entries are inside."""
    half = ((high - low) / 2).clamp_min(1e-10)
    return (x - (high + low) / 2) / half, (x >= low) & (x <= high)


def _round(x: Tensor, low: Tensor, high: Tensor, levels: Tensor) -> Tensor:
    scaled, inside = _scale(x, low, high)
    bounds = (levels[1:] + levels[:-1]) / 2
    decoded = levels[torch.bucketize(scaled.contiguous(), bounds)]
    half = ((high - low) / 2).clamp_min(1e-10)
    return torch.where(inside, decoded * half + (high + low) / 2, x.half().float())


def weighted_levels(x: Tensor, gradients: Tensor, count: int) -> Tensor:
    """k-means in one dimension, each number weighted by its squared gradient."""
    step = max(1, x.numel() // KMEANS_SAMPLES)
    x, order = x[::step].double().sort()
    weights = gradients[::step].double().square()[order] + 1e-30
    total, first = weights.cumsum(0), (weights * x).cumsum(0)
    levels = torch.linspace(-1, 1, count + 2, dtype=torch.float64, device=x.device)[1:-1]
    zero = torch.zeros(1, dtype=torch.float64, device=x.device)
    total, first = torch.cat([zero, total]), torch.cat([zero, first])
    for _ in range(100):
        edges = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        edges = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), x.numel())])
        weight = total[edges[1:]] - total[edges[:-1]]
        moved = (first[edges[1:]] - first[edges[:-1]]) / weight.clamp_min(1e-300)
        levels = torch.where(weight > 0, moved, levels)
    return levels.float()


SIMULATIONS = (KVQuant(name="kvquant-3bit"),)
