"""Tables of docs/vllm.md and docs/sglang.md from runs of gpu_vllm.py and gpu_sglang.py.

    python scripts/serving_table.py docs/results/vllm-h200.json

The record holds, for each run, its arguments and the lines it printed. Ratios are oscarkv's gain
over the backend in the column, within one runner (of which SGLang has one).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = "oscarkv"
#: Figures by backend, runner and what was measured.
Figures = dict[tuple[str, str], dict[str, float]]


def figures(record: dict[str, Any]) -> Figures:
    """Milliseconds and seconds are turned over: a larger figure is a better one."""
    found: Figures = {}
    for run in record["runs"]:
        engine, *lines = run["lines"]
        if engine["options"]:
            continue  # answers with other windows: not for speed
        runner = ""
        if "runner" in engine:
            runner = "v2" if engine["runner"].endswith("gpu.model_runner") else "v1"
        here = found.setdefault((engine["backend"], runner), {})
        longest = (engine.get("max_model_len") or engine["context_length"]) // 1000
        here[f"capacity, requests of {longest}K tokens"] = engine["capacity_tokens"]
        for line in lines:
            if line["what"] == "step":
                here[f"step, {line['batch']} x {line['context']:,}"] = 1000 / line["ms"]
            elif line["what"] == "throughput":
                # gpu_sglang.py prints what `oscarkv bench serving` measures, with its names.
                theirs = {"requests": "batch", "new_tokens": "new", "tokens_per_s": "tokens_s"}
                line = {theirs.get(key, key): value for key, value in line.items()}
                name = "throughput, {batch} x {context:,}, {new} new".format(**line)
                name += ", prompts read" * bool(line.get("prompts_read"))
                here[name] = line["tokens_s"]
            elif line["what"] == "prefill":
                here[f"prefill, {line['tokens']:,}"] = line["tokens_s"]
    return found


def table(found: Figures, runner: str) -> Iterator[str]:
    others = [backend for backend, which in found if which == runner and backend != OURS]
    yield f"| {f'runner {runner}' if runner else ''} | oscarkv | " + " | ".join(others) + " |"
    yield "|---" * (len(others) + 2) + "|"
    for name, ours in found[OURS, runner].items():
        cells = [shown(name, ours)]
        for backend in others:
            figure = found[backend, runner].get(name)
            cells.append("" if figure is None else f"{shown(name, figure)} ({ours / figure:.2f}x)")
        yield f"| {name} | " + " | ".join(cells) + " |"


def shown(name: str, figure: float) -> str:
    return f"{1000 / figure:.2f} ms" if name.startswith("step") else f"{figure:,.0f}"


def answers(record: dict[str, Any]) -> Iterator[str]:
    """How far the chances of tokens lie apart, up to the first other token."""
    made = [
        (run["lines"][0]["backend"], [x for x in run["lines"] if x["what"] == "answer"])
        for run in record["runs"]
    ]
    made = [(backend, lines) for backend, lines in made if lines]
    if not made:
        return
    (name, ours), (other, theirs) = sorted(made, key=lambda x: x[0] != OURS)
    alone, together = ([x for x in theirs if (x["batch"] > 1) == many] for many in (False, True))
    for label, pairs in (
        (f"{name} and {other}", zip(ours, theirs, strict=True)),
        (f"{other} alone and in a batch", zip(alone, together, strict=True)),
    ):
        apart, same = [], []
        for a, b in pairs:
            equal = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
            first = equal.index(False) if False in equal else len(equal)
            same.append(first)
            both = zip(a["logprobs"][:first], b["logprobs"][:first], strict=True)
            apart += [abs(x - y) for x, y in both]
        mean = sum(apart) / len(apart)
        yield f"{label}: same tokens {same}, logprobs {mean:.3f} apart ({max(apart):.3f} at most)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    record = json.loads(parser.parse_args().record.read_text(encoding="utf-8"))
    found = figures(record)
    for runner in sorted({runner for _, runner in found}, reverse=True):
        print("\n".join(table(found, runner)), end="\n\n")
    print("\n".join(answers(record)))


if __name__ == "__main__":
    main()
