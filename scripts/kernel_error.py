"""How exact the kernels are on a real model's keys, values and queries: against the oracle in fp64.

    python scripts/kernel_error.py MODEL --artifact FILE --text FILE --json OUT

The model reads text through an `OscarCache`, in chunks and then a few tokens at a time. Every
`prefill` and `decode` is computed once more by the torch backend in fp64 over the same bytes, and
every `write` is repeated by it from the same bytes, so the cache that is compared is the one the
kernels made. An error is the norm of the difference over the norm of the oracle's output, of all
tokens and heads of a layer's call. Rounding the output to bf16 is part of it, which alone may be
2^-8 where one number outweighs all others. So the error of the oracle's own output, rounded, stands
beside it, and what is left of the kernel's without it: sqrt(error^2 - rounding^2). Exits with 1
where that is larger than 2e-3, or more than one code in a thousand differs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oscarkv
from oscarkv.artifact import load_artifact
from oscarkv.benchmark import machine
from oscarkv.benchmark.accuracy import LARGEST_ERROR, LARGEST_SHARE, codes
from oscarkv.kernels import AttentionBackend, LayerCache
from oscarkv.kernels.torch_backend import TorchBackend

FORMAT = "oscarkv-kernel-error-1"
#: Tokens a step once the chunks are read: one by one, and as drafts are.
DECODED = (1, 1, 1, 1, 4, 8)


class Checked:
    """A backend whose results are all compared with the oracle's."""

    def __init__(self, fast: AttentionBackend) -> None:
        self.fast, self.oracle = fast, TorchBackend(torch.float64)
        self.name, self.write_batch = fast.name, 1  # every token's codes at once
        self.errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.codes = self.differing = 0
        self.largest_key = 0.0  # over the root mean square of its layer and step

    def reserve(self, sequences: int) -> None:
        self.fast.reserve(sequences)

    def plan(self, *arguments: Any) -> None:
        self.fast.plan(*arguments)
        self.oracle.plan(*arguments)

    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        before = layer.history.clone()
        self.fast.write(k, v, history_slots, window_slots, layer)
        written, layer.history = layer.history, before
        self.oracle.write(k, v, history_slots, torch.full_like(window_slots, -1), layer)
        for mine, its in zip(codes(layer, written), codes(layer, before), strict=True):
            self.differing += int((mine != its).sum())
        layer.history = written
        self.codes += 2 * k[history_slots >= 0].numel()
        keys = k.double()
        outlier = float(keys.abs().max() / keys.square().mean().sqrt())
        self.largest_key = max(self.largest_key, outlier)

    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        self.fast.decode(q, layer, out)
        expected = torch.empty_like(out, dtype=torch.float64)
        self.oracle.decode(q, layer, expected)
        self._compare("decode", out, expected)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        self.fast.prefill(q, k, v, layer, out)
        expected = torch.empty_like(out, dtype=torch.float64)
        self.oracle.prefill(q, k, v, layer, expected)
        self._compare("prefill", out, expected)

    def _compare(self, kernel: str, found: Tensor, expected: Tensor) -> None:
        norm = expected.norm()
        error = float((found.double() - expected).norm() / norm)
        rounding = float((expected.to(found.dtype).double() - expected).norm() / norm)
        self.errors[kernel].append((error, rounding))


@torch.inference_mode()
def measure(
    model: Any, tokens: Tensor, chosen: argparse.Namespace, backend: str, dtype: str
) -> dict[str, Any]:
    model = copy.deepcopy(model).to(chosen.device, getattr(torch, dtype))
    cache = oscarkv.OscarCache(model, load_artifact(chosen.artifact), backend=backend)
    cache.backend = checked = Checked(cache.backend)
    decoded = sum(DECODED)
    prompt = tokens.shape[1] - decoded
    if prompt <= chosen.chunk:
        raise SystemExit(f"the text has {tokens.shape[1]} tokens; more than one chunk is needed")
    steps = [min(chosen.chunk, prompt - at) for at in range(0, prompt, chosen.chunk)]
    at = 0
    for count in (*steps, *DECODED):
        part = tokens[:, at : at + count].to(chosen.device)
        model(part, past_key_values=cache, logits_to_keep=1)
        at += count
        print(f"{backend} {dtype}: {at} of {tokens.shape[1]} tokens", file=sys.stderr)
    return {
        "backend": checked.name,
        "dtype": dtype,
        "tokens": at,
        "largest_key_over_rms": checked.largest_key,
        "codes": checked.codes,
        "codes_that_differ": checked.differing,
        **{kernel: summary(errors) for kernel, errors in checked.errors.items()},
    }


def summary(errors: list[tuple[float, float]]) -> dict[str, float]:
    rest = [math.sqrt(max(0.0, error**2 - rounding**2)) for error, rounding in errors]
    largest, rounding = max(errors)
    return {
        "calls": len(errors),
        "largest": largest,
        "of_it_rounding": rounding,
        "median": statistics.median(error for error, _ in errors),
        "calls_above_bound": sum(error > LARGEST_ERROR for error, _ in errors),
        "largest_without_rounding": max(rest),
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model")
    add("--artifact", type=Path, required=True)
    add("--text", type=Path, required=True)
    add("--tokens", type=int, default=8192)
    add("--chunk", type=int, default=2048)
    add("--backends", nargs="+", default=["cuda", "triton"])
    add("--dtypes", nargs="+", default=["bfloat16", "float16"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, metavar="OUT")
    return parser.parse_args(words)


def good(result: dict[str, Any]) -> bool:
    largest = [result[kernel]["largest_without_rounding"] for kernel in ("prefill", "decode")]
    share = result["codes_that_differ"] / result["codes"]
    return all(error <= LARGEST_ERROR for error in largest) and share <= LARGEST_SHARE


def main(words: Sequence[str] | None = None) -> int:
    chosen = arguments(words)
    model, tokenizer = oscarkv.load_model(chosen.model, device="cpu")
    text = chosen.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : chosen.tokens]
    results = [
        measure(model, tokens, chosen, name, kind)
        for name in chosen.backends
        for kind in chosen.dtypes
    ]
    record = {
        "format": FORMAT,
        "model": Path(chosen.model).name,
        "text": chosen.text.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": machine.gpu(0).name if chosen.device == "cuda" else machine.processor(),
        "versions": machine.versions(),
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
