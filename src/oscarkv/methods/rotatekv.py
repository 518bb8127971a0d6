"""RotateKV (Su et al., IJCAI 2025, arXiv 2501.16383): 2 bits after a rotation over several heads.

Keys before RoPE are turned by a Hadamard matrix that spans up to four heads; the channels of the
layer are then put in the order of their sums on calibration text, so that channels of like size
share parameters, and rounded per token, asymmetric min/max. Values are turned by a Hadamard matrix
per head. Read back, keys are put in order, turned back, and given their RoPE.

Departures. Groups are of head_dim channels with 16-bit scale and minimum, no clipping. The paper
keeps 20 tokens with massive activations exact; alone, this keeps the first 20 instead of looking
for them. Odd numbers of heads get the Hartley-Hadamard matrix of `oscarkv.linalg`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from oscarkv.linalg import hadamard
from oscarkv.methods.simulation import LayerSamples, Simulation, round_uniform

HEAD_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class RotateKV(Simulation):
    bits_per_code: int = 2

    own_windows: ClassVar[tuple[int, int]] = (20, 1)
    before_rope: ClassVar[bool] = True
    needs: ClassVar[str] = "samples"

    def fit(self, samples: LayerSamples) -> _Rounding:
        heads, dim = samples.shape
        group = HEAD_GROUP if heads % HEAD_GROUP == 0 else heads
        device = samples.keys.device
        across = hadamard(group * dim).float().to(device)
        turned = _turn(samples.keys, across)
        order = turned.sum(0).argsort()
        return _Rounding(self.bits_per_code, across, hadamard(dim).float().to(device), order)

    def history_bits(self, heads: int, dim: int) -> float:
        return self.bits_per_code + 32 / dim


@dataclass(frozen=True)
class _Rounding:
    bits: int
    across: Tensor  # [g d, g d]
    within: Tensor  # [d, d]
    order: Tensor  # [H d]: channel that comes first, second, ...

    def keys(self, keys: Tensor) -> Tensor:
        heads, tokens, dim = keys.shape
        turned = _turn(keys, self.across)[:, self.order]
        rounded = round_uniform(turned.view(tokens, heads, dim), self.bits).flatten(1)
        back = rounded[:, self.order.argsort()].unflatten(1, (-1, self.across.shape[0]))
        return (back @ self.across.T).view(tokens, heads, dim).transpose(0, 1)

    def values(self, values: Tensor) -> Tensor:
        return round_uniform(values @ self.within, self.bits) @ self.within.T


def _turn(keys: Tensor, across: Tensor) -> Tensor:
    """[H, T, d] -> all channels of the layer, groups of heads turned: [T, H d]."""
    rows = keys.transpose(0, 1).flatten(1).unflatten(1, (-1, across.shape[0]))
    return (rows @ across).flatten(1)


SIMULATIONS = (RotateKV(name="rotatekv-2bit"),)
