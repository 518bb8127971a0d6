"""What rounding one side of one layer costs, and from that which layers get more bits.

Each part is rounded by itself, everything else is exact, and the KL divergence of the predictions
is measured on two kinds of text: as it runs, and where a passage comes again, far behind, so that
its second reading looks up the first. What is looked up hangs on very few layers (in SmolLM2 on the
keys of two of 30), which running text hardly shows. A sequence has both:

    | a passage | what follows it | the passage again |
               running            |   looked up

Layers before the one that is rounded do what they did in the exact pass: they are not run again.
All of it is computed in fp32: most parts cost less than what rounding to 16 bits does by itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oscarkv.artifact import Artifact
from oscarkv.artifact.round_trip import AsRead
from oscarkv.calibration.budget import (
    SIDES,
    Part,
    affordable,
    choose,
    parts_of,
    with_more,
)
from oscarkv.calibration.general import general_texts
from oscarkv.integrations.transformers.attention import attention_implementation
from oscarkv.integrations.transformers.geometry import decoder_layers
from oscarkv.integrations.transformers.precision import computing_in_float32
from oscarkv.integrations.transformers.predictions import log_probabilities
from oscarkv.integrations.transformers.simulate import SimulatedCache, Windows
from oscarkv.integrations.transformers.text import again, spread_sequences
from oscarkv.methods import simulation
from oscarkv.recipe import Recipe

logger = logging.getLogger("oscarkv")

KINDS = ("running", "looked up")
#: Tokens of a sequence, and how many of the given text and of the general one are measured.
LENGTH, SEQUENCES = 2048, 1
#: Of the scored positions every second one is: neighbours tell nearly the same.
STRIDE = 2
#: Positions whose logits are held at a time.
BLOCK = 256

#: KL by kind of text.
Cost = Mapping[str, float]
Progress = Callable[[int, int, str], None]


@dataclass
class _Reading:
    """A sequence that was read exactly: what every layer made of it, and what was predicted."""

    sequence: Tensor
    scored: dict[str, Tensor]  # positions, by kind
    outputs: list[Any] = field(default_factory=list)
    predicted: dict[str, Tensor] = field(default_factory=dict)  # log probabilities


class LayerCosts:
    """KL with parts rounded by themselves. Measures nothing twice; `known` may be kept on disk."""

    def __init__(
        self,
        model: Any,
        artifact: Artifact,
        sequences: Sequence[Tensor],
        known: MutableMapping[str, Any] | None = None,
    ) -> None:
        recipe = artifact.recipe
        self.model, self.artifact = model, artifact
        self.windows = Windows(recipe.sink, recipe.recent)
        self.layers = decoder_layers(model)
        self.known = {} if known is None else known
        self._place = _digest(artifact, sequences, model.dtype)
        self._readings = [_Reading(s.to(model.device), _scored(s, recipe)) for s in sequences]

    def whole(self) -> Cost:
        """With everything rounded."""
        return self._cost("all", lambda: (self._rounding(list(self.artifact.layers), SIDES), 0))

    def part(self, part: Part, *, more: bool = False) -> Cost:
        """With one part rounded, `more`: to one bit more."""
        layer, side = part
        artifact = with_more(self.artifact, [part]) if more else self.artifact
        bits = artifact.layer_recipe(layer)
        name = f"layer {layer}, {side} of {bits.key_bits if side == 'keys' else bits.value_bits}"
        return self._cost(name, lambda: (self._rounding([layer], (side,), artifact), layer))

    def _rounding(
        self, layers: Sequence[int], sides: Sequence[str], artifact: Artifact | None = None
    ) -> dict[int, simulation.Quantizer]:
        found = self.artifact if artifact is None else artifact
        return {
            i: simulation.Part(
                AsRead.of(found.layers[i], found.layer_recipe(i), self.model.device),
                None,
                tuple(sides),
            )
            for i in layers
        }

    def _cost(
        self, name: str, what: Callable[[], tuple[dict[int, simulation.Quantizer], int]]
    ) -> Cost:
        key = f"{self._place} {name}"
        if key not in self.known:
            rounding, first = what()
            found = [self._measure(reading, rounding, first) for reading in self._readings]
            self.known[key] = {
                kind: sum(cost[kind] for cost in found) / len(found) for kind in KINDS
            }
        return dict(self.known[key])

    @torch.no_grad()
    def _measure(
        self, reading: _Reading, rounding: dict[int, simulation.Quantizer], first: int
    ) -> Cost:
        if not reading.predicted:
            with computing_in_float32(self.model, self.layers):
                with _recording(self.layers, reading.outputs):
                    hidden = self._read(reading.sequence, {})
                for kind, positions in reading.scored.items():
                    reading.predicted[kind] = log_probabilities(self.model, hidden[positions])
        with computing_in_float32(self.model, self.layers[first:]):
            with _starting_at(self.layers, first, reading.outputs):
                hidden = self._read(reading.sequence, rounding)
            return {
                kind: self._divergence(reading.predicted[kind], hidden[positions])
                for kind, positions in reading.scored.items()
            }

    def _read(self, sequence: Tensor, rounding: dict[int, simulation.Quantizer]) -> Tensor:
        cache = SimulatedCache(self.model, rounding, self.windows)
        with attention_implementation(self.model):
            read = self.model.base_model(input_ids=sequence, past_key_values=cache, use_cache=True)
        return read.last_hidden_state[0]

    def _divergence(self, exact: Tensor, hidden: Tensor) -> float:
        total = 0.0
        for p, rows in zip(exact.split(BLOCK), hidden.split(BLOCK), strict=True):
            q = log_probabilities(self.model, rows)
            total += float((p.exp() * (p - q)).sum(-1).double().sum())
        return max(total / len(exact), 0.0)


def _digest(artifact: Artifact, sequences: Sequence[Tensor], dtype: torch.dtype) -> str:
    """The same for measurements that give the same figures."""
    recipe = artifact.recipe.replace(name="", budget=None)
    asked = [recipe.to_json(), artifact.model.fingerprint, str(dtype)]
    asked.append(str(sorted(artifact.calibration.items())))
    digest = hashlib.sha256("\n".join(asked).encode())
    for sequence in sequences:
        digest.update(sequence.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _scored(sequence: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    length, exact = sequence.shape[1], recipe.sink + recipe.recent
    back = length - length // 3  # from here on the passage comes again
    return {
        "running": torch.arange(8 * exact // 5, back, STRIDE),
        "looked up": torch.arange(back, length - 1, STRIDE),
    }


@contextmanager
def _recording(layers: Sequence[nn.Module], outputs: list[Any]) -> Iterator[None]:
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _starting_at(layers: Sequence[nn.Module], first: int, outputs: Sequence[Any]) -> Iterator[None]:
    """Have all layers before `first` answer with what the last of them had made."""
    skipped = layers[:first]
    for layer in skipped:
        layer.forward = lambda *_inputs, **_named: outputs[first - 1]
    try:
        yield
    finally:
        for layer in skipped:
            del layer.forward


def measuring_sequences(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    recipe: Recipe,
    *,
    general: bool,
    length: int = LENGTH,
    count: int = SEQUENCES,
) -> list[Tensor]:
    """Of the given text and of the general one; none where all of it would be read exactly."""
    context = model.config.get_text_config().max_position_embeddings
    found = []
    for some in (texts, general_texts() if general else ()):
        found += spread_sequences(
            some, tokenizer, count, min(length, context), shortest_measured(recipe)
        )
    return [again(sequence, tokenizer) for sequence in found]


def shortest_measured(recipe: Recipe) -> int:
    """A third that comes again must lie beyond the exact tokens."""
    return 3 * (recipe.sink + recipe.recent)


def share_out(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    artifact: Artifact,
    *,
    general: bool = True,
    length: int = LENGTH,
    count: int = SEQUENCES,
    known: MutableMapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Give the parts of a model that need it one bit more, within the recipe's budget.

    A part's cost is its share of what rounding everything costs, on both kinds of text alike. What
    was measured goes into the artifact's `calibration`. `length` and `count`: of the sequences.
    """
    recipe, identity = artifact.recipe, artifact.model
    assert recipe.budget is not None, "there is nothing to share out"
    bits = affordable(recipe, identity.head_dim, len(artifact.layers), recipe.budget)
    if bits < 0:
        logger.warning(
            "%s: %d bits for every code take %.3f bits at 128K with head_dim %d, more than the "
            "budget of %g; no layer gets more",
            recipe.name,
            recipe.key_bits,
            recipe.bits(identity.head_dim),
            identity.head_dim,
            recipe.budget,
        )
    if bits <= 0:
        return artifact
    sequences = measuring_sequences(
        model, tokenizer, texts, recipe, general=general, length=length, count=count
    )
    if not sequences:
        logger.warning(
            "%s: no document has the %d tokens that layers are measured on; all get the same bits",
            recipe.name,
            shortest_measured(recipe),
        )
        return artifact
    costs = LayerCosts(model, artifact, sequences, known)
    parts = parts_of(artifact)
    total, done = len(parts) + 2 * bits, 0  # about: how many are worth a look is not known before
    whole = costs.whole()

    def share(part: Part, more: bool = False) -> float:
        nonlocal done
        cost = costs.part(part, more=more)
        done += 1
        if progress:
            progress(min(done, total), total, f"{part[1]} of layer {part[0]}")
        return sum(cost[kind] / all_of for kind, all_of in whole.items() if all_of > 0)

    chosen = choose({p: share(p) for p in parts}, bits, lambda part: share(part, True))
    result = with_more(artifact, chosen)
    result.calibration = artifact.calibration | {
        "layer_costs": {
            "all": whole,
            "alone": {f"{side} {layer}": costs.part((layer, side)) for layer, side in parts},
            "predicted": _predicted(costs, parts, chosen),
        }
    }
    return result


def _predicted(costs: LayerCosts, parts: Sequence[Part], chosen: Sequence[Part]) -> Cost:
    """Parts do not quite add up to the whole: their sum is scaled to what the whole is."""
    found = {}
    for kind, whole in costs.whole().items():
        alone = sum(costs.part(part)[kind] for part in parts)
        left = sum(costs.part(part, more=part in chosen)[kind] for part in parts)
        found[kind] = whole * left / alone if alone > 0 else whole
    return found
