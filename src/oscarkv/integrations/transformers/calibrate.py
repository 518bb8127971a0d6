"""Calibrate a Transformers model: run text through it, and fit every layer to what it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact import Artifact
from oscarkv.artifact.files import library_version
from oscarkv.calibration.fit import fit_layer
from oscarkv.calibration.general import general_texts
from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.errors import CalibrationError, UnsupportedModelError
from oscarkv.integrations.transformers.attach import values_are_folded
from oscarkv.integrations.transformers.geometry import ModelGeometry, describe
from oscarkv.integrations.transformers.layer_costs import (
    LENGTH,
    share_out,
    shortest_measured,
)
from oscarkv.integrations.transformers.passes import CalibrationRun, Progress, blends
from oscarkv.integrations.transformers.text import (
    calibration_sequences,
    echoes,
    general_sequences,
    text_sha256,
)
from oscarkv.methods import needs
from oscarkv.recipe import Recipe

DEFAULT_TOKENS = 30000
#: At most about this many tokens of general text, and at most this many times those given.
GENERAL_TOKENS, GENERAL_RATIO = 24576, 4
DEFAULT_LENGTH = 4096
#: Statistics are averaged over positions up to this, where the model reaches it.
DEFAULT_TARGET_LENGTH = 32768


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
        if general and any(blends(recipe) for recipe in group):
            given = sum(sequence.shape[1] for sequence in sequences)
            blended = _general_sequences(tokenizer, given, length, shortest)
        run = CalibrationRun(
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
            if blended and blends(named[index]):
                facts["general_sha256"] = text_sha256(general_texts())
            found[index] = Artifact(
                geometry.identity, named[index], transforms, facts, library_version()
            )
    for index, artifact in found.items():
        if artifact.recipe.budget is not None:
            measured = max(min(length // 2, LENGTH), shortest_measured(artifact.recipe))
            found[index] = share_out(
                model,
                tokenizer,
                texts,
                artifact,
                general=general,
                length=measured,
                progress=progress,
            )
    return [found[index] for index in range(len(named))]


def _general_sequences(
    tokenizer: Any, given: int, length: int, shortest: int
) -> list[list[Tensor]]:
    """The general text, and its echoes: what of them is long enough to be read beyond the windows,
    which is nothing where those are very long."""
    texts = general_texts()
    most = min(GENERAL_TOKENS, GENERAL_RATIO * given)
    both = [
        general_sequences(texts, tokenizer, most, length, shortest),
        [echo for echo in echoes(texts, tokenizer, length) if echo.shape[1] >= shortest],
    ]
    return [sequences for sequences in both if sequences]


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
