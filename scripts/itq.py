"""Whether rotations learned by iterative quantisation (ITQ) beat the Hadamard mixing of a recipe.

    python scripts/itq.py MODEL --artifact FILE --calibration-text FILE --text FILE ... --json OUT

Starts from an artifact. For every layer, rows of calibration text are rounded as a reader sees
them, and the rotation that brings the rows nearest to what they were rounded to is put behind the
transform (Procrustes), again and again: Gong and Lazebnik, 2011. Where keys are refined, channels
stay within their class of bits. Then the artifact and the one with learned rotations are measured
on the same windows of other text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oscarkv
from oscarkv.artifact import Artifact, LayerTransforms
from oscarkv.artifact.round_trip import keys_as_read, values_as_read
from oscarkv.evaluation.fidelity import evaluation_windows, measure_fidelity
from oscarkv.evaluation.subjects import simulate_artifact
from oscarkv.integrations.transformers.simulate import collect_samples
from oscarkv.recipe import Recipe

FORMAT = "oscarkv-itq-1"


def procrustes(rows: Tensor, targets: Tensor, blocks: Sequence[int]) -> Tensor:
    """The rotations [H, d, d], of each block of channels by itself, that bring rows [H, T, d]
    nearest to their targets."""
    rotation = torch.zeros(rows.shape[0], rows.shape[-1], rows.shape[-1], device=rows.device)
    start = 0
    for size in blocks:
        part = slice(start, start + size)
        product = rows[..., part].double().mT @ targets[..., part].double()
        u, _, v = torch.linalg.svd(product)
        rotation[:, part, part] = (u @ v).float()
        start += size
    return rotation


def turn_keys(layer: LayerTransforms, rotation: Tensor) -> LayerTransforms:
    """What reads the codes turns with them: (A R)^-T E = A^-T R A^T (A^-T E)."""
    inverse = torch.linalg.inv(layer.key.double()).mT
    query = inverse @ rotation.double() @ layer.key.double().mT @ layer.query.double()
    return dataclasses.replace(layer, key=layer.key @ rotation, query=query.float())


def turn_values(layer: LayerTransforms, rotation: Tensor) -> LayerTransforms:
    return dataclasses.replace(
        layer,
        value=layer.value @ rotation,
        value_inverse=rotation.mT @ layer.value_inverse,
    )


def learn(
    layer: LayerTransforms,
    recipe: Recipe,
    keys: Tensor,
    values: Tensor,
    rounds: int,
    sides: Sequence[str],
) -> tuple[LayerTransforms, dict[str, tuple[float, float]]]:
    """The layer with rotations learned from keys and values [H, T, d], and the mean squared error
    of its stored rows before and after, of their energy."""
    dim = keys.shape[-1]
    classes = [dim // 4, dim // 2, dim // 4] if recipe.refined else [dim]
    plans: dict[str, tuple[Tensor, Any, Any, Any, list[int]]] = {
        "keys": (keys, keys_as_read, "key", turn_keys, classes),
        "values": (values, values_as_read, "value", turn_values, [dim]),
    }
    errors = {}
    for side in sides:
        x, as_read, name, turn, blocks = plans[side]
        history = []
        for index in range(rounds + 1):
            mean = getattr(layer, f"{name}_mean")[:, None]
            transform = getattr(layer, name)
            rows = (x - mean) @ transform
            targets = (as_read(x, layer, recipe) - mean) @ transform
            history.append(float((rows - targets).square().mean() / rows.square().mean()))
            if index < rounds:
                layer = turn(layer, procrustes(rows, targets, blocks))
        errors[side] = (history[0], history[-1])
    return layer, errors


def learned(
    artifact: Artifact,
    model: Any,
    sequences: list[Tensor],
    rounds: int,
    sides: Sequence[str],
    say: Callable[[str], None],
) -> tuple[Artifact, dict[str, Any]]:
    samples = collect_samples(
        model, sequences, sorted(artifact.layers), before_rope=False, gradients=False
    )
    layers, errors = {}, {}
    for index, layer in sorted(artifact.layers.items()):
        here = dataclasses.replace(
            layer, **{name: tensor.to(model.device) for name, tensor in layer.tensors().items()}
        )
        found = samples.pop(index)
        turned, errors[str(index)] = learn(
            here, artifact.layer_recipe(index), found.keys, found.values, rounds, sides
        )
        layers[index] = turned
        say(f"layer {index}: {errors[str(index)]}")
    return dataclasses.replace(artifact, layers=layers), errors


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model")
    add("--artifact", type=Path, required=True)
    add("--calibration-text", type=Path, required=True)
    add("--text", type=Path, action="append", required=True)
    add("--samples", default="2048:4", metavar="LENGTH:WINDOWS", help="of calibration text")
    add("--windows", default="4096:4", metavar="LENGTH:WINDOWS", help="that are measured")
    add("--rounds", type=int, default=20)
    add("--device")
    add("--json", type=Path, metavar="OUT")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen, began = arguments(words), time.time()

    def say(what: str) -> None:
        print(f"{time.time() - began:6.0f} s  {what}", file=sys.stderr, flush=True)

    model, tokenizer = oscarkv.load_model(chosen.model, dtype="float32", device=chosen.device)
    artifact = oscarkv.load_artifact(chosen.artifact)
    length, count = map(int, chosen.samples.split(":"))
    sequences = evaluation_windows(
        model, tokenizer, [chosen.calibration_text.read_text(encoding="utf-8")], length, count
    )
    subjects = {"as it is": simulate_artifact(artifact, model.device)}
    errors = {}
    for name, sides in (("keys learned", ["keys"]), ("both learned", ["keys", "values"])):
        turned, errors[name] = learned(artifact, model, sequences, chosen.rounds, sides, say)
        subjects[name] = simulate_artifact(turned, model.device)
    length, count = map(int, chosen.windows.split(":"))
    texts = [path.read_text(encoding="utf-8") for path in chosen.text]
    found = measure_fidelity(model, tokenizer, texts, subjects, length=length, windows=count)
    record = {
        "format": FORMAT,
        "model": model.oscarkv_name,
        "recipe": artifact.recipe.name,
        "samples": chosen.samples,
        "windows": chosen.windows,
        "rounds": chosen.rounds,
        "device": str(model.device) if model.device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "errors": errors,
        "scores": {name: dataclasses.asdict(score) for name, score in found.recipes.items()},
    }
    for name, score in found.recipes.items():
        print(f"{name:14} KL {score.kl:.5f} +- {score.kl_se:.5f}  top-1 {score.top1:.4f}")
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
