"""What an artifact holds, in figures that fit on a screen."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact.artifact import Artifact, LayerTransforms
from oscarkv.recipe import Recipe

#: Context lengths that bits are quoted at.
LENGTHS = (4096, 8192, 32768, 131072)


@dataclass(frozen=True)
class LayerSummary:
    """One layer: means over its KV heads, and the worst head's condition. None: not known."""

    layer: int
    top1: float | None  # share of the stored keys' energy on their first principal axis
    top8: float | None  # and on the first eight
    effective_rank: float | None  # exp of the entropy of the spectrum: how many axes matter
    condition: float  # cond(A), the largest over heads
    inverse_error: float  # largest entry of A A^-1 - I
    logit_error: float | None  # relative, as predicted on held-back text
    value_error: float | None
    fallback: list[int]  # heads that use Hadamard instead of the fitted transform
    key_bits: int
    value_bits: int


@dataclass(frozen=True)
class ArtifactSummary:
    model: dict[str, Any]
    recipe: str
    knobs: dict[str, Any]  # those that differ from the defaults
    calibration: dict[str, Any]
    library_version: str
    bits: dict[int, float]  # per element of the packed layers, by context length
    layers: list[LayerSummary]

    @property
    def heads(self) -> int:
        return len(self.layers) * int(self.model["kv_heads"])

    @property
    def bits_of(self) -> str:
        """What the bits are of, to be said after them where not all layers are packed."""
        packed, layers = len(self.layers), int(self.model["layers"])
        return "" if packed == layers else f" of the packed layers, {packed} of {layers}"

    @property
    def more_bits(self) -> str:
        """Which layers have codes of more bits than the others; empty: none."""
        found = []
        for side, bits in (
            ("keys", {layer.layer: layer.key_bits for layer in self.layers}),
            ("values", {layer.layer: layer.value_bits for layer in self.layers}),
        ):
            for count in sorted(set(bits.values()) - {min(bits.values())}):
                of = ", ".join(str(layer) for layer, has in bits.items() if has == count)
                found.append(f"{count} for {side} of {of}")
        return "; ".join(found)

    @property
    def rounding(self) -> str:
        """KL that rounding was measured to cost when bits were shared out; empty: it was not."""
        costs = self.calibration.get("layer_costs")
        if not costs:
            return ""
        kinds = [
            f"{costs['all'][kind]:.4f} -> {costs['predicted'][kind]:.4f} ({kind})"
            for kind in costs["all"]
        ]
        return f"{', '.join(kinds)}, predicted"

    @property
    def fallback_heads(self) -> int:
        return sum(len(layer.fallback) for layer in self.layers)

    @property
    def inverse_error(self) -> float:
        return max(layer.inverse_error for layer in self.layers)

    @property
    def mean_logit_error(self) -> float | None:
        return _mean([layer.logit_error for layer in self.layers])

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "fallback_heads": self.fallback_heads,
            "mean_logit_error": self.mean_logit_error,
            "inverse_error": self.inverse_error,
        }


def summarise(artifact: Artifact) -> ArtifactSummary:
    defaults = dataclasses.asdict(Recipe())
    knobs = dataclasses.asdict(artifact.recipe)
    return ArtifactSummary(
        model=dataclasses.asdict(artifact.model),
        recipe=artifact.recipe.name,
        knobs={k: v for k, v in knobs.items() if k != "name" and v != defaults[k]},
        calibration=artifact.calibration,
        library_version=artifact.library_version,
        bits={length: artifact.bits(length) for length in LENGTHS},
        layers=[
            _layer(index, layer, artifact.layer_recipe(index))
            for index, layer in sorted(artifact.layers.items())
        ],
    )


def _layer(index: int, layer: LayerTransforms, recipe: Recipe) -> LayerSummary:
    shares = layer.spectrum.double()
    shares = shares / shares.sum(-1, keepdim=True)  # NaN where nothing was observed
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return LayerSummary(
        layer=index,
        top1=_known(shares[:, 0]),
        top8=_known(shares[:, :8].sum(-1)),
        effective_rank=_known(entropy.exp()),
        condition=float(layer.condition.max()),
        inverse_error=max(layer.inverse_errors(recipe).values()),
        logit_error=_known(layer.errors[0]),
        value_error=_known(layer.errors[1]),
        fallback=layer.fallback.nonzero().flatten().tolist(),
        key_bits=recipe.key_bits,
        value_bits=recipe.value_bits,
    )


def _known(heads: Tensor) -> float | None:
    return _mean([value for value in heads.tolist() if math.isfinite(value)])


def _mean(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
