"""What a scale for each kind of channel buys: keys and values apart, running and repeated text.

    python scripts/two_scales.py MODEL --texts DIR --json docs/results/two-scales-NAME.json

Fits `uniform`, `compact` and `precise` to `wiki-calibration.txt` of the directory that
scripts/accuracy_texts.py makes, and measures them on windows of `wiki`, `botchan` and `essays`, and
on passages of `wiki` that come twice, which the model then finds by looking them up. So for other
gains of `precise`, and for other scales of its channels with two digits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oscarkv
from oscarkv.codec import encode
from oscarkv.evaluation.fidelity import evaluation_windows, measure_windows
from oscarkv.evaluation.prepare import fit_artifacts
from oscarkv.evaluation.subjects import SIDES, Simulated, simulate_artifact
from oscarkv.recipe import Recipe

FORMAT = "oscarkv-two-scales-1"
RECIPES = ("uniform", "compact", "precise")
GAINS, SCALES = (0.75, 0.5), (0.5, 0.5625, 0.59375)
#: Of the measured text: where the first passage begins, and how many passages apart they lie.
FIRST_PASSAGE, PASSAGES_APART = 5000, 7


def passages_twice(tokens: Sequence[int], length: int, count: int) -> list[Tensor]:
    """Sequences [1, length] of a passage and the same passage again."""
    half = length // 2
    starts = [FIRST_PASSAGE + PASSAGES_APART * half * index for index in range(count)]
    if starts and starts[-1] + half > len(tokens):
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than {starts[-1] + half}")
    return [torch.tensor([list(tokens[start : start + half]) * 2]) for start in starts]


@contextmanager
def scale_of_two_digits(scale: float | None) -> Iterator[None]:
    """The oracle's rounding with another scale than the format's."""
    own = encode.SPLIT_SCALE
    encode.SPLIT_SCALE = own if scale is None else own | {2: scale}
    try:
        yield
    finally:
        encode.SPLIT_SCALE = own


def subjects(artifacts: dict[str, Any], device: torch.device) -> dict[str, tuple[Simulated, Any]]:
    """What is measured, by name, and the scale it is rounded with, if not the format's."""
    found: dict[str, tuple[Simulated, Any]] = {}
    whole = {name: simulate_artifact(artifact, device) for name, artifact in artifacts.items()}
    precise = artifacts["precise"]
    for name, subject in whole.items():
        found[name] = (subject, None)
    for gain in GAINS:
        changed = replace(precise, recipe=precise.recipe.replace(key_gain=gain))
        found[f"precise, key gain {gain}"] = (simulate_artifact(changed, device), None)
    for scale in SCALES:
        found[f"precise, scale {scale}"] = (whole["precise"], scale)
    for name in ("precise", "compact"):
        for side in SIDES:
            found[f"{name}, {side} alone"] = (whole[name].part(sides=[side]), None)
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model")
    add("--texts", type=Path, required=True)
    add("--windows", default="4096:8", metavar="LENGTH:WINDOWS", help="of running text")
    add("--twice", default="2048:8", metavar="LENGTH:PASSAGES", help="both times together")
    add("--tokens", type=int, default=30000, help="calibration tokens")
    add("--device")
    add("--json", type=Path, required=True, metavar="OUT")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen, began = arguments(words), time.time()

    def text(name: str) -> str:
        return (chosen.texts / f"{name}.txt").read_text(encoding="utf-8")

    model, tokenizer = oscarkv.load_model(chosen.model, dtype="float32", device=chosen.device)
    recipes = {name: Recipe.named(name) for name in RECIPES}
    artifacts = fit_artifacts(
        model, tokenizer, [text("wiki-calibration")], recipes, tokens=chosen.tokens
    )
    length, count = map(int, chosen.windows.split(":"))
    running = evaluation_windows(
        model, tokenizer, [text(name) for name in ("wiki", "botchan", "essays")], length, count
    )
    length, count = map(int, chosen.twice.split(":"))
    tokens = tokenizer(text("wiki"))["input_ids"]
    repeated = [twice.to(model.device) for twice in passages_twice(tokens, length, count)]
    record: dict[str, Any] = {
        "format": FORMAT,
        "model": model.oscarkv_name,
        "windows": chosen.windows,
        "twice": chosen.twice,
        "tokens": chosen.tokens,
    }
    for kind, sequences in (("running", running), ("twice", repeated)):
        record[kind], references = {}, {}
        for name, (subject, scale) in subjects(artifacts, model.device).items():
            with scale_of_two_digits(scale):
                score = measure_windows(
                    model, sequences, kind, {name: subject}, references=references
                ).recipes[name]
            record[kind][name] = {
                "bits_128k": score.bits_128k,
                "kl": score.kl,
                "kl_se": score.kl_se,
                "top1": score.top1,
            }
            line = f"{kind:8} {name:24} {score.bits_128k:.3f} {score.kl:.5f} +- {score.kl_se:.5f}"
            print(f"{time.time() - began:6.0f} s  {line}", file=sys.stderr, flush=True)
            chosen.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
