"""Which layers get more bits: from measured sensitivities to an artifact within a budget.

Keys and values of each layer are rounded to 2 bits by themselves, and the KL that follows is
measured. What a third or fourth bit would leave of it is predicted from the self-check's errors at
those bits, since KL grows with the square of a small error. Bits then go, one at a time, where
they take away most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.errors import OscarError
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.fidelity import Progress
from oscarkv.evaluation.prepare import fit_artifacts
from oscarkv.evaluation.sensitivity import Sensitivity, measure_sensitivity
from oscarkv.evaluation.subjects import SIDES, simulate_artifact
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.recipe import CODE_BITS, Recipe

LENGTH = 131072  # the context at which the budget holds, as everywhere

Part = tuple[int, Literal["keys", "values"]]


@dataclass(frozen=True)
class Tuned:
    artifact: Artifact
    sensitivity: Sensitivity  # of the base recipe
    base_kl: float
    predicted_kl: float


def tune(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    budget: float,
    *,
    recipe: Recipe,
    tokens: int = 30000,
    calibration_length: int | None = None,
    length: int = 2048,
    windows: int = 2,
    keep: Path | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Fit a recipe with the bits of every layer's keys and values chosen for a budget."""
    if recipe.exact:
        raise OscarError(f"recipe {recipe.name!r} packs nothing; there are no bits to share out")
    by_bits = {
        bits: recipe.replace(key_bits=bits, value_bits=bits)
        for bits in (CODE_BITS if recipe.fit == "least-squares" else CODE_BITS[:1])
    }
    lowest = min(by_bits)
    least = by_bits[lowest].bits(describe(model).identity.head_dim, LENGTH)
    if least > budget:
        raise OscarError(
            f"--bits {budget}: recipe {recipe.name!r} takes {least:.3f} bits at 128K with {lowest} "
            "for every code; ask for more, or for a recipe with smaller parameters (compact)"
        )
    done = Checkpoint(keep)  # first: it makes the directory, or says at once why it cannot
    fitted = fit_artifacts(
        model,
        tokenizer,
        texts,
        {f"{recipe.name}-{bits}": each for bits, each in by_bits.items()},
        tokens=tokens,
        length=calibration_length,
        keep=keep,
        progress=progress,
    )
    artifacts = {bits: fitted[f"{recipe.name}-{bits}"] for bits in by_bits}
    base = artifacts[lowest]
    sensitivity = measure_sensitivity(
        model,
        tokenizer,
        texts,
        simulate_artifact(base, model.device),
        parts=["layers"],
        length=length,
        windows=windows,
        checkpoint=done,
        progress=progress,
    )
    costs = predicted_costs(sensitivity, artifacts)
    chosen = allocate(costs, budget_steps(base, budget))
    tuned = assemble(artifacts, chosen)
    base_kl = sensitivity.of()
    # Parts do not quite add up to the whole: the prediction is scaled to what the whole is.
    alone = sum(cost[lowest] for cost in costs.values())
    left = sum(costs[part][bits] for part, bits in chosen.items())
    return Tuned(tuned, sensitivity, base_kl, base_kl * left / alone if alone > 0 else base_kl)


def predicted_costs(
    sensitivity: Sensitivity, artifacts: Mapping[int, Artifact]
) -> dict[Part, dict[int, float]]:
    """KL that each layer's keys and values cost, by their bits."""
    lowest = min(artifacts)
    costs: dict[Part, dict[int, float]] = {}
    for layer in artifacts[lowest].layers:
        for index, side in enumerate(SIDES):
            measured = max(sensitivity.of(sides=side, layer=layer), 0.0)
            errors = {b: float(a.layers[layer].errors[index].mean()) for b, a in artifacts.items()}
            costs[layer, side] = {b: measured * e / errors[lowest] for b, e in errors.items()}  # type: ignore[index]
    return costs


def budget_steps(base: Artifact, budget: float) -> int:
    """How many times one side of one layer can be given one more bit."""
    recipe, layers = base.recipe, len(base.layers)
    exact = min(recipe.sink + recipe.recent, LENGTH) / LENGTH
    step = (1 - exact) / (2 * layers)
    return int((budget - base.bits(LENGTH)) / step + 1e-9)


def allocate(costs: Mapping[Part, Mapping[int, float]], steps: int) -> dict[Part, int]:
    """Bits of every part: the next bit always goes where it takes away most. Costs fall ever more
    slowly with bits, so that no other way of giving out single bits does better."""
    chosen = {part: min(cost) for part, cost in costs.items()}
    for _ in range(steps):
        gains = {
            part: costs[part][bits] - costs[part][bits + 1]
            for part, bits in chosen.items()
            if bits + 1 in costs[part]
        }
        if not gains:
            break
        best = max(gains, key=lambda part: gains[part])
        if gains[best] <= 0:
            break
        chosen[best] += 1
    return chosen


def assemble(artifacts: Mapping[int, Artifact], chosen: Mapping[Part, int]) -> Artifact:
    """One artifact with each layer's keys and values as fitted for their bits."""
    base = artifacts[min(artifacts)]
    layers: dict[int, LayerTransforms] = {}
    layer_bits: dict[int, tuple[int, int]] = {}
    for index in base.layers:
        bits = chosen[index, "keys"], chosen[index, "values"]
        keys, values = (artifacts[b].layers[index] for b in bits)
        layers[index] = LayerTransforms(
            key=keys.key,
            query=keys.query,
            key_mean=keys.key_mean,
            value=values.value,
            value_inverse=values.value_inverse,
            value_mean=values.value_mean,
            exponents=torch.stack([keys.exponents[0], values.exponents[1]]),
            spectrum=keys.spectrum,
            errors=torch.stack([keys.errors[0], values.errors[1]]),
            fallback=keys.fallback,
            metric=keys.metric,
        )
        layers[index] = LayerTransforms(**{n: t.cpu() for n, t in layers[index].tensors().items()})
        if bits != (base.recipe.key_bits, base.recipe.value_bits):
            layer_bits[index] = bits
    return replace(base, layers=layers, layer_bits=layer_bits)
