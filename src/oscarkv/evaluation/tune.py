"""Which layers get more bits: from measured costs to an artifact within a budget.

Keys and values of each layer are rounded by themselves, and the KL that follows is measured on two
kinds of text: as it runs, and where a passage comes twice, so that its second reading looks up the
first, far back. What is looked up hangs on very few layers (in SmolLM2 on the keys of two of 30),
which running text hardly shows. A bit goes where it takes away most, of both kinds alike.

What another bit leaves is measured too, but only where it could win: at best it takes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.errors import OscarError
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.fidelity import Progress, evaluation_windows, measure_windows
from oscarkv.evaluation.prepare import fit_artifacts
from oscarkv.evaluation.subjects import SIDES, Simulated, simulate_artifact
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.integrations.transformers.text import echo, text_sha256
from oscarkv.recipe import CODE_BITS, Recipe

LENGTH = 131072  # the context at which the budget holds, as everywhere
KINDS = ("running", "looked up")

Part = tuple[int, str]  # layer, and one of SIDES
#: KL by kind of text.
Cost = Mapping[str, float]


@dataclass(frozen=True)
class Tuned:
    artifact: Artifact
    alone: Mapping[Part, Cost]  # each part by itself, with the fewest bits
    base_kl: Cost
    predicted_kl: Cost


@dataclass
class Meter:
    """KL with parts rounded by themselves, by kind of text. Measures nothing twice."""

    model: Any
    sequences: Mapping[str, Sequence[Tensor]]
    texts_sha256: str
    subjects: Mapping[int, Simulated]  # by bits
    checkpoint: Checkpoint
    report: Callable[[int, str], None]  # called with how many parts are done, and the last one
    references: dict[str, Tensor] = field(default_factory=dict)
    measured: dict[tuple[Part, int], Cost] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Cost:
        """With everything rounded to the fewest bits."""
        bits = min(self.subjects)
        return self._measure(f"all layers, {bits} bits", self.subjects[bits])

    def part(self, part: Part, bits: int) -> Cost:
        if (part, bits) not in self.measured:
            layer, side = part
            name = f"{side} of layer {layer}, {bits} bits"
            subject = self.subjects[bits].part(layers=[layer], sides=[side])
            self.measured[part, bits] = self._measure(name, subject)
            self.report(len(self.measured), name)
        return self.measured[part, bits]

    def share(self, part: Part, bits: int) -> float:
        """Of what rounding everything costs, over both kinds of text together."""
        cost = self.part(part, bits)
        return sum(cost[kind] / whole for kind, whole in self.whole.items() if whole > 0)

    def predicted(self, chosen: Mapping[Part, int]) -> Cost:
        """Parts do not quite add up to the whole: their sum is scaled to what the whole is."""
        found = {}
        for kind, whole in self.whole.items():
            alone = sum(self.part(part, min(self.subjects))[kind] for part in chosen)
            left = sum(self.part(part, bits)[kind] for part, bits in chosen.items())
            found[kind] = whole * left / alone if alone > 0 else whole
        return found

    def _measure(self, name: str, subject: Simulated) -> Cost:
        found = {}
        for kind, sequences in self.sequences.items():
            result = measure_windows(
                self.model,
                sequences,
                self.texts_sha256,
                {name: subject},
                checkpoint=self.checkpoint,
                references=self.references,
            )
            found[kind] = max(result.recipes[name].kl, 0.0)
        return found


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
    exact = recipe.sink + recipe.recent
    if length <= 2 * exact:
        raise OscarError(
            f"--length {length}: a passage that comes twice must outgrow the {exact} exact tokens "
            f"to be looked up in the codes; take more than {2 * exact}"
        )
    running = evaluation_windows(model, tokenizer, texts, length, windows)
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
    parts: list[Part] = [(layer, side) for layer in base.layers for side in SIDES]
    steps = budget_steps(base, budget)
    total = len(parts) + 2 * steps  # about: how many are worth a look is not known beforehand

    def report(count: int, what: str) -> None:
        if progress:
            progress(min(count, total), total, what)

    echoes = [echo(sequence, tokenizer) for sequence in running]
    meter = Meter(
        model,
        dict(zip(KINDS, (running, echoes), strict=True)),
        text_sha256(texts),
        {bits: simulate_artifact(each, model.device) for bits, each in artifacts.items()},
        done,
        report,
    )
    costs = {part: meter.share(part, lowest) for part in parts}
    chosen = allocate(costs, list(by_bits), steps, meter.share)
    tuned = assemble(artifacts, chosen)
    return Tuned(
        # A name of its own: records of measurements go by it.
        replace(tuned, recipe=tuned.recipe.replace(name=f"tuned-{budget:g}")),
        {part: meter.part(part, lowest) for part in parts},
        meter.whole,
        meter.predicted(chosen),
    )


def budget_steps(base: Artifact, budget: float) -> int:
    """How many times one side of one layer can be given one more bit."""
    recipe, layers = base.recipe, len(base.layers)
    exact = min(recipe.sink + recipe.recent, LENGTH) / LENGTH
    step = (1 - exact) / (2 * layers)
    return int((budget - base.bits(LENGTH)) / step + 1e-9)


def allocate(
    costs: Mapping[Part, float],
    widths: Sequence[int],
    steps: int,
    cost: Callable[[Part, int], float],
) -> dict[Part, int]:
    """Bits of every part: the next bit always goes where it takes away most. `costs` are those
    with the fewest bits; `cost` is asked for others, one that could be the best at a time."""
    lowest, *more = sorted(widths)
    chosen = dict.fromkeys(costs, lowest)
    known = {(part, lowest): found for part, found in costs.items()}
    while steps:

        def gain(part: Part) -> float:
            now, bits = known[part, chosen[part]], chosen[part] + 1
            return now - known.get((part, bits), 0.0)

        open_parts = [part for part, bits in chosen.items() if bits + 1 in more]
        best = max(open_parts, key=gain, default=None)
        if best is None or gain(best) <= 0:
            break
        bits = chosen[best] + 1
        if (best, bits) in known:
            chosen[best] = bits
            steps -= 1
        else:
            known[best, bits] = cost(best, bits)
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
