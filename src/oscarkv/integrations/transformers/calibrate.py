"""Calibrate a Transformers model: run text through it, and fit every layer to what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.artifact.files import library_version
from oscarkv.calibration.fit import LayerCheck, fit_layer, observe_checks
from oscarkv.calibration.general import general_texts
from oscarkv.calibration.statistics import AttentionCall, LayerStatistics
from oscarkv.errors import CalibrationError, UnsupportedModelError
from oscarkv.integrations.transformers.attach import values_are_folded
from oscarkv.integrations.transformers.attention import attention_implementation, observing
from oscarkv.integrations.transformers.geometry import ModelGeometry, describe, rope_turns
from oscarkv.integrations.transformers.text import (
    calibration_sequences,
    echoes,
    general_sequences,
    text_sha256,
)
from oscarkv.methods import needs
from oscarkv.recipe import Recipe

logger = logging.getLogger("oscarkv")

DEFAULT_TOKENS = 30000
#: At most about this many tokens of general text, and at most this many times those given.
GENERAL_TOKENS, GENERAL_RATIO = 24576, 4
DEFAULT_LENGTH = 4096
#: Statistics are averaged over positions up to this, where the model reaches it.
DEFAULT_TARGET_LENGTH = 32768
#: The average over positions is taken over contexts of this many lengths, from the calibration
#: length to the target in equal ratios, and over this many positions in each.
CONTEXT_LENGTHS, CONTEXT_OFFSETS = 8, 8

#: Called with (work done, work in all, what is being done); the work is in tokens.
Progress = Callable[[int, int, str], None]


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    recipe: Recipe | str = "balanced",
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    target_length: int | None = None,
    seed: int = 0,
    general: bool = True,
    quantize_sliding: bool = False,
    skip_layers: Sequence[int] = (),
    skip_unsupported: bool = False,
    progress: Progress | None = None,
) -> Artifact:
    """Fit a recipe's transforms to a model, from documents of plain text.

        model, tokenizer = oscarkv.load_model("smollm2")
        artifact = oscarkv.calibrate(model, tokenizer, [open("book.txt").read()])
        oscarkv.save_artifact(artifact, "smollm2.safetensors")

    `length` defaults to min(context, 4096), `target_length` to min(context, 32768). With `general`
    the bundled text counts as much as the given (see `oscarkv.calibration.general`), in recipes
    that weigh what is read; those of the published method see the given text alone.
    Deterministic for a seed on one machine. Nothing of the text is kept but statistics.
    """
    artifacts = calibrate_many(
        model,
        tokenizer,
        texts,
        recipes=[recipe],
        tokens=tokens,
        length=length,
        target_length=target_length,
        seed=seed,
        general=general,
        quantize_sliding=quantize_sliding,
        skip_layers=skip_layers,
        skip_unsupported=skip_unsupported,
        progress=progress,
    )
    return artifacts[0]


def calibrate_many(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    recipes: Sequence[Recipe | str],
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    target_length: int | None = None,
    seed: int = 0,
    general: bool = True,
    quantize_sliding: bool = False,
    skip_layers: Sequence[int] = (),
    skip_unsupported: bool = False,
    progress: Progress | None = None,
) -> list[Artifact]:
    """`calibrate` for several recipes at once: those with the same windows share their passes."""
    named = [Recipe.named(r) if isinstance(r, str) else r for r in recipes]
    if isinstance(texts, str):
        texts = [texts]
    if values_are_folded(model):
        raise UnsupportedModelError(
            "this model has values folded into its weights; detach() it before calibrating"
        )
    geometry = describe(model)
    layers = geometry.select(
        quantize_sliding=quantize_sliding,
        skip_layers=tuple(skip_layers),
        skip_unsupported=skip_unsupported,
    )
    if length is None:
        length = min(geometry.identity.context or DEFAULT_LENGTH, DEFAULT_LENGTH)
    target_length = _target_length(geometry, length, target_length)
    found: dict[int, Artifact] = {}
    by_windows: dict[tuple[int, int], list[int]] = {}
    for index, recipe in enumerate(named):
        if needs(recipe):
            by_windows.setdefault((recipe.sink, recipe.recent), []).append(index)
        else:
            found[index] = data_free(geometry, layers, recipe)
    for (sink, recent), indices in by_windows.items():
        shortest = min(length, sink + recent + 64)
        sequences = calibration_sequences(texts, tokenizer, tokens, length, shortest)
        group = [named[index] for index in indices]
        blended: list[list[Tensor]] = []
        if general and any(_blends(recipe) for recipe in group):
            bundled = general_texts()
            given = sum(sequence.shape[1] for sequence in sequences)
            most = min(GENERAL_TOKENS, GENERAL_RATIO * given)
            blended = [
                general_sequences(bundled, tokenizer, most, length, shortest),
                echoes(bundled, tokenizer, length),
            ]
        run = _Run(
            model, geometry, layers, sequences, blended, seed, progress, length, target_length
        )
        for index, transforms in zip(indices, run.fit(group, sink, recent), strict=True):
            facts = {
                "text_sha256": text_sha256(texts),
                "tokens": sum(s.shape[1] for s in sequences),
                "sequences": len(sequences),
                "length": length,
                "target_length": target_length if named[index].average_positions else length,
                "seed": seed,
                "skipped_layers": sorted(set(range(geometry.identity.layers)) - set(layers)),
            }
            if blended and _blends(named[index]):
                facts["general_sha256"] = text_sha256(general_texts())
            found[index] = Artifact(
                geometry.identity, named[index], transforms, facts, library_version()
            )
    return [found[index] for index in range(len(named))]


def _blends(recipe: Recipe) -> bool:
    """Whether general text is part of its statistics: where reads are weighed, one kind of text
    tells too little. The published recipes are kept as published."""
    return "pairs" in needs(recipe)


def data_free(geometry: ModelGeometry, layers: Sequence[int], recipe: Recipe) -> Artifact:
    """An artifact of a recipe that asks for no data."""
    identity = geometry.identity
    transforms = {}
    for layer in layers:
        blank = LayerStatistics.blank(
            layer, identity.kv_heads, identity.head_dim, torch.device("cpu")
        )
        transforms[layer] = fit_layer(blank, recipe)
    return Artifact(identity, recipe, transforms, {"tokens": 0}, library_version())


def _target_length(geometry: ModelGeometry, length: int, target_length: int | None) -> int:
    context, name = geometry.identity.context, geometry.identity.name
    if length < 2:
        raise CalibrationError(f"--length {length} is too short")
    if context and length > context:
        raise CalibrationError(
            f"--length {length} is beyond the context of {name} ({context} tokens)"
        )
    if target_length is None:
        return min(context or DEFAULT_TARGET_LENGTH, DEFAULT_TARGET_LENGTH)
    if context and target_length > context:
        raise CalibrationError(
            f"--target-length {target_length} is beyond the context of {name} ({context} tokens)"
        )
    return target_length


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
    """Say what refining keys does to logits on held-back text; warn where it does harm."""
    pairs = [
        torch.stack([layers[index].errors[0], plain])
        for index, check in checks.items()
        if (plain := check.unrefined_errors) is not None
    ]
    if not pairs:
        return
    refined, plain = torch.cat(pairs, 1)
    better = bool(refined.mean() <= plain.mean())
    logger.log(
        logging.INFO if better else logging.WARNING,
        "%s: mean error of logits on held-back text %.4f, without refined keys %.4f; they do "
        "worse in %d of %d heads%s",
        recipe.name,
        float(refined.mean()),
        float(plain.mean()),
        int((refined > plain).sum()),
        len(plain),
        "" if better else ": calibrate on more text, or with --set refine_keys=false",
    )


class _Run:
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
        statistics = [blended if _blends(recipe) else own for recipe in recipes]
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
                    fit_layer(found[layer], recipe.replace(refine_keys=False), turns[layer])
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
