"""KIVI (Liu et al., ICML 2024, arXiv 2402.02750): keys per channel, values per token, 2 bits.

Key channels have outliers that stay in place, so a channel's entries in 32 consecutive tokens share
their scale; values have none, and 32 channels of one token do. Both are asymmetric min/max with a
16-bit scale and a 16-bit zero. Its residual window is 128 tokens, and it keeps no sink.

Departure: a group of keys is rounded once all its tokens have left the recent window (as in the
paper), and here the values of those tokens wait with them; the paper's leave one by one. That
favours KIVI by at most 31 exact values, and they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from oscarkv.methods.simulation import LayerSamples, Simulation, round_uniform

GROUP = 32


@dataclass(frozen=True, kw_only=True)
class Kivi(Simulation):
    bits_per_code: int = 2

    own_windows: ClassVar[tuple[int, int]] = (0, 128)
    token_group: ClassVar[int] = GROUP

    def fit(self, samples: LayerSamples) -> Kivi:
        return self

    def keys(self, keys: Tensor) -> Tensor:
        whole = keys.shape[1] // GROUP * GROUP
        rounded = keys.clone()
        by_channel = keys[:, :whole].unflatten(1, (-1, GROUP)).transpose(2, 3)
        by_channel = round_uniform(by_channel, self.bits_per_code)
        rounded[:, :whole] = by_channel.transpose(2, 3).flatten(1, 2)
        return rounded  # the last group is not full yet, and no query reads it rounded

    def values(self, values: Tensor) -> Tensor:
        grouped = values.unflatten(-1, (-1, min(GROUP, values.shape[-1])))
        return round_uniform(grouped, self.bits_per_code).flatten(-2)

    def history_bits(self, heads: int, dim: int) -> float:
        return self.bits_per_code + (32 / GROUP + 32 / min(GROUP, dim)) / 2


SIMULATIONS = (Kivi(name="kivi-2bit"),)
