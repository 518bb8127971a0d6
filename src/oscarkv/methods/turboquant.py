"""TurboQuant (Zandieh et al., arXiv 2504.19874) at 3 bits: its MSE variant, with a norm correction.

A row is divided by its norm and turned by a random rotation; its coordinates are then close to
normal with variance 1/d whatever the row was, so one Lloyd-Max codebook made for that distribution
serves all. The norm is stored in 16 bits, corrected so that the decoded row has it up to that
rounding, which the paper does not do. Its other variant, for inner products, which adds a sketch of
the residual (QJL), is left out. Keys and values are treated alike; engines that serve a method of
this name may treat them otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oscarkv.methods.simulation import LayerSamples, Simulation


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Simulation):
    bits_per_code: int = 3
    seed: int = 0

    def fit(self, samples: LayerSamples) -> _Rounding:
        _, dim = samples.shape
        # One rotation a layer, the same for all heads, from a seed: nothing is stored.
        key, value = (
            random_rotation(dim, 2 * (self.seed + 1000 * samples.layer) + side).to(
                samples.keys.device
            )
            for side in (0, 1)
        )
        codebook = normal_codebook(self.bits_per_code).to(samples.keys.device) / dim**0.5
        return _Rounding(key, value, codebook)

    def history_bits(self, heads: int, dim: int) -> float:
        return self.bits_per_code + 16 / dim


@dataclass(frozen=True)
class _Rounding:
    key_rotation: Tensor
    value_rotation: Tensor
    codebook: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        return self._round(keys, self.key_rotation)

    def values(self, values: Tensor) -> Tensor:
        return self._round(values, self.value_rotation)

    def _round(self, rows: Tensor, rotation: Tensor) -> Tensor:
        norms = rows.norm(dim=-1, keepdim=True)
        turned = (rows / norms.clamp_min(1e-30)) @ rotation
        bounds = (self.codebook[1:] + self.codebook[:-1]) / 2
        decoded = self.codebook[torch.bucketize(turned, bounds)]
        # Stored: the norm over that of the decoded unit row, so that decoding gives the norm back.
        stored = (norms / decoded.norm(dim=-1, keepdim=True)).half().float()
        return (decoded * stored) @ rotation.T


def random_rotation(dim: int, seed: int) -> Tensor:
    """A rotation drawn evenly from all: QR of a normal matrix, the signs of R made positive."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return (q * r.diagonal().sign()).float()


@lru_cache(maxsize=4)
def normal_codebook(bits: int) -> Tensor:
    """Lloyd-Max levels of the standard normal distribution, by its own fixed-point iteration."""
    normal = torch.distributions.Normal(
        torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    )
    count = 1 << bits
    levels = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    infinity = torch.tensor([float("inf")], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat([-infinity, (levels[1:] + levels[:-1]) / 2, infinity])
        density = torch.exp(-edges.square() / 2) / (2 * torch.pi) ** 0.5
        levels = (density[:-1] - density[1:]) / (normal.cdf(edges[1:]) - normal.cdf(edges[:-1]))
    return levels.float()


SIMULATIONS = (TurboQuant(name="turboquant-3bit"),)
