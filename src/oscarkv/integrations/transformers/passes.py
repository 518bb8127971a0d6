"""The passes of a calibration: text through the model, statistics, fit, self-check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oscarkv.artifact import LayerTransforms
from oscarkv.calibration.fit import LayerCheck, fit_layer, observe_checks
from oscarkv.calibration.statistics import AttentionCall, LayerStatistics
from oscarkv.errors import UnsupportedModelError
from oscarkv.integrations.transformers.attention import attention_implementation, observing
from oscarkv.integrations.transformers.geometry import ModelGeometry, rope_turns
from oscarkv.methods import needs
from oscarkv.recipe import Recipe

logger = logging.getLogger("oscarkv")

#: The average over positions is taken over contexts of this many lengths, from the calibration
#: length to the target in equal ratios, and over this many positions in each.
CONTEXT_LENGTHS, CONTEXT_OFFSETS = 8, 8

#: Called with (work done, work in all, what is being done); the work is in tokens.
Progress = Callable[[int, int, str], None]


def blends(recipe: Recipe) -> bool:
    """Whether general text is part of its statistics: where reads are weighed, one kind of text
    tells too little. The published recipes are kept as published."""
    return "pairs" in needs(recipe)


def position_offsets(length: int, target_length: int) -> Tensor:
    """Where text will stand that was calibrated at the start of a context, sorted.

    Short contexts are as likely as long ones (equal weight for each ratio of lengths), so near
    positions count more than far ones: averaging evenly up to the target costs short contexts a
    third of their accuracy (docs/benchmarks.md).
    """
    ratio = target_length / length
    steps = torch.linspace(0, 1, CONTEXT_LENGTHS, dtype=torch.float64)
    lengths = length * ratio**steps
    offsets = [torch.linspace(0, float(n - length), CONTEXT_OFFSETS) for n in lengths]
    return torch.cat(offsets).round().long().sort().values


def _report_refining(
    recipe: Recipe, layers: dict[int, LayerTransforms], checks: dict[int, LayerCheck]
) -> None:
    """Say what refining keys does to logits on held-back text; warn where it does harm.

    The median head decides: single ones may lose by far while predictions gain. Of SmolLM2's 90
    heads a quarter lose, one by seven times, and yet KL is far lower with refined keys. Of keys of
    3 bits it tells too little to warn by: there SmolLM2's median head loses 15 %, while the KL that
    keys cost falls by 11 %, and that of answers looked up far back to a third.
    """
    pairs = [
        torch.stack([layers[index].errors[0], plain])
        for index, check in checks.items()
        if (plain := check.unrefined_errors) is not None
    ]
    if not pairs:
        return
    refined, plain = torch.cat(pairs, 1)
    ratio = float((refined / plain).nanmedian())
    better = not ratio > 1
    level = logging.INFO if better or recipe.key_bits > 2 else logging.WARNING
    logger.log(
        level,
        "%s: in the median head, refined keys make %.2f times the error of logits of plain ones on "
        "held-back text; they do worse in %d of %d heads%s",
        recipe.name,
        ratio,
        int((refined > plain).sum()),
        len(plain),
        ""
        if level == logging.INFO
        else ": calibrate on more text, or with --set refine_keys=false",
    )


class CalibrationRun:
    """The passes over the calibration text for recipes that share their windows."""

    def __init__(
        self,
        model: Any,
        geometry: ModelGeometry,
        layers: Sequence[int],
        sequences: list[Tensor],
        blended: Sequence[list[Tensor]],
        seed: int,
        progress: Progress | None,
        length: int,
        target_length: int,
    ) -> None:
        self.model, self.geometry, self.layers = model, geometry, list(layers)
        self.seed, self.progress = seed, progress
        held = max(1, len(sequences) // 8) if len(sequences) > 1 else 0
        self.training = sequences[: len(sequences) - held]
        self.held_back = sequences[len(sequences) - held :] or sequences
        self.blended = blended
        self.length, self.target_length = length, target_length
        self.done = self.total = 0

    def fit(
        self, recipes: Sequence[Recipe], sink: int, recent: int
    ) -> list[dict[int, LayerTransforms]]:
        wanted = frozenset().union(*(needs(recipe) for recipe in recipes))
        passes = [self.training, *self.blended, self.held_back]
        if "scores" in wanted:
            passes.insert(1, self.training)
        self.total = sum(s.shape[1] for sequences in passes for s in sequences)

        generator = torch.Generator().manual_seed(self.seed)

        def gather(sequences: Sequence[Tensor], what: str) -> dict[int, LayerStatistics]:
            found = {
                layer: LayerStatistics(layer, sink, recent, "pairs" in wanted)
                for layer in self.layers
            }
            self._pass(sequences, what, lambda i, call: found[i].observe(call, generator))
            return found

        own = gather(self.training, "statistics")
        if "scores" in wanted:
            self._pass(self.training, "score weights", lambda i, call: own[i].observe_scores(call))
        parts = [own, *(gather(sequences, "general text") for sequences in self.blended)]
        blended = own
        if self.blended:
            blended = {i: LayerStatistics.blend([part[i] for part in parts]) for i in self.layers}
        statistics = [blended if blends(recipe) else own for recipe in recipes]
        turns = {layer: self._turns(layer) for layer in self.layers}
        fitted = [
            {layer: fit_layer(found[layer], recipe, turns[layer]) for layer in self.layers}
            for recipe, found in zip(recipes, statistics, strict=True)
        ]
        checks = [
            {
                layer: LayerCheck(
                    t,
                    found[layer],
                    recipe,
                    fit_layer(found[layer], recipe.unrefined, turns[layer])
                    if recipe.refined
                    else None,
                )
                for layer, t in transforms.items()
            }
            for recipe, found, transforms in zip(recipes, statistics, fitted, strict=True)
        ]

        self._pass(
            self.held_back,
            "self-check",
            lambda i, call: observe_checks([c[i] for c in checks], call, generator),
        )
        results = []
        for recipe, recipe_checks in zip(recipes, checks, strict=True):
            result = {layer: check.result() for layer, check in recipe_checks.items()}
            if heads := sum(int(layer.fallback.sum()) for layer in result.values()):
                logger.info(
                    "%s: plain Hadamard did better on held-back text for %d heads, and is used "
                    "there (oscarkv inspect lists them)",
                    recipe.name,
                    heads,
                )
            _report_refining(recipe, result, recipe_checks)
            results.append(result)
        return results

    def _turns(self, layer: int) -> Tensor | None:
        if self.target_length <= self.length:
            return None
        offsets = position_offsets(self.length, self.target_length)
        turns = rope_turns(self.model, layer, self.geometry.identity.head_dim, offsets)
        if turns is None:
            logger.warning("layer %d: no RoPE found; statistics are not averaged", layer)
        return turns

    def _pass(
        self,
        sequences: Sequence[Tensor],
        what: str,
        observe: Callable[[int, AttentionCall], None],
    ) -> None:
        """Run sequences through the model, handing each layer's attention to `observe`."""
        wanted = set(self.layers)
        seen: set[int] = set()

        def observer(
            module: nn.Module,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            scale: float,
            kwargs: dict[str, Any],
        ) -> None:
            layer = getattr(module, "layer_idx", None)
            if layer not in wanted:
                return
            self._check_shapes(int(layer), q, k, v)
            seen.add(int(layer))
            observe(
                int(layer),
                AttentionCall(
                    q[0],
                    k[0],
                    v[0],
                    out[0].transpose(0, 1),
                    scale,
                    kwargs.get("softcap"),
                    kwargs.get("sliding_window"),
                ),
            )

        decoder = self.model.base_model  # no logits: calibration does not need them
        device = next(self.model.parameters()).device
        with attention_implementation(self.model), observing(observer), torch.no_grad():
            for sequence in sequences:
                decoder(input_ids=sequence.to(device), use_cache=False)
                self.done += sequence.shape[1]
                if self.progress:
                    self.progress(self.done, self.total, what)
        if missing := sorted(wanted - seen):
            raise UnsupportedModelError(
                f"{self.geometry.identity.name}: layers {', '.join(map(str, missing))} did not go "
                "through Transformers' attention interface; leave them out with --skip-layers"
            )

    def _check_shapes(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        identity = self.geometry.identity
        expected = (identity.kv_heads, identity.head_dim)
        for what, tensor in (("keys", k), ("values", v)):
            found = (tensor.shape[1], tensor.shape[3])
            if found != expected:
                raise UnsupportedModelError(
                    f"layer {layer}: {what} have {found[0]} heads of {found[1]}, the model's "
                    f"configuration says {expected[0]} of {expected[1]}; leave the layer out with "
                    f"--skip-layers {layer}"
                )
