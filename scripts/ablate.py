"""What each part of `uniform` buys, at several context lengths, on one model.

    python scripts/ablate.py MODEL --calibration-text wiki.txt --text dev.txt ... --json OUT

Every variant is calibrated on the same text and measured on the same windows, strictly.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscarkv import load_model
from oscarkv.evaluation.fidelity import measure_fidelity
from oscarkv.integrations.transformers import calibrate, passes
from oscarkv.recipe import Recipe

UNIFORM = Recipe.named("uniform")
EVEN = UNIFORM.replace(refine_keys=False)


def evenly(length: int, target: int) -> Tensor:
    """Offsets spread evenly up to the target length."""
    return torch.linspace(0, target - length, 32).round().long()


def half_at_start(length: int, target: int) -> Tensor:
    """Half of the weight at offset 0, the rest spread evenly."""
    offsets = evenly(length, target)
    return torch.cat([torch.zeros_like(offsets), offsets])


#: Name: recipe, position average (None: the library's), tokens.
VARIANTS: dict[str, tuple[Recipe, Any, int]] = {
    "uniform": (UNIFORM, None, 30000),
    "positions averaged evenly": (UNIFORM, evenly, 30000),
    "half of them at the start": (UNIFORM, half_at_start, 30000),
    "positions not averaged": (UNIFORM.replace(average_positions=False), None, 30000),
    "100k calibration tokens": (UNIFORM, None, 100000),
    "keys not refined": (EVEN, None, 30000),
    "Hadamard": (EVEN.replace(key_transform="hadamard"), None, 30000),
    "metric rounding": (EVEN.replace(metric_rounding=True), None, 30000),
    "without the unbiasing gain": (UNIFORM.replace(key_gain=0.0, value_gain=0.0), None, 30000),
    "recent 512": (UNIFORM.replace(recent=512), None, 30000),
    "compact": (Recipe.named("compact"), None, 30000),
    "paper": (Recipe.named("paper"), None, 30000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--calibration-text", type=Path, action="append", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--lengths", default="4096:12,8192:6", help="LENGTH:WINDOWS, ...")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    logging.getLogger("oscarkv").setLevel(logging.ERROR)  # fallbacks are counted below
    lengths = [tuple(map(int, item.split(":"))) for item in arguments.lengths.split(",")]
    texts = [path.read_text() for path in arguments.text]
    calibration = [path.read_text() for path in arguments.calibration_text]
    model, tokenizer = load_model(arguments.model, dtype="float32")
    library_offsets = passes.position_offsets
    results: dict[str, Any] = {}
    for name in arguments.variants.split(","):
        recipe, offsets, tokens = VARIANTS[name.strip()]
        start = time.time()
        passes.position_offsets = offsets or library_offsets
        artifact = calibrate.calibrate(
            model, tokenizer, calibration, recipe=recipe, tokens=tokens, general=False
        )
        passes.position_offsets = library_offsets
        row = {"fallback_heads": sum(int(t.fallback.sum()) for t in artifact.layers.values())}
        for length, windows in lengths:
            measured = measure_fidelity(
                model, tokenizer, texts, {name: artifact}, length=length, windows=windows
            )
            score = measured.recipes[name]
            row[str(length)] = {"kl": score.kl, "kl_se": score.kl_se, "top1": score.top1}
        results[name] = row
        print(f"{name:30} {row} {time.time() - start:.0f} s", flush=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
