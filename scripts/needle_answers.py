"""How far packed caches move the answers to questions about hidden facts.

    python scripts/needle_answers.py MODEL --text wiki.txt --artifact a.safetensors b.safetensors \\
        --lengths 4k,16k --contexts 10 --json OUT

Full precision answers greedily; its answers are then given to every cache token by token, and the
KL divergence of each token from full precision is taken. That tells far more of a question than
whether an answer was right. `differ` is the share of answers in which some token would have been
another one. Contexts are those of `oscarkv eval needle` with other seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from oscarkv import OscarCache, load_artifact, load_model
from oscarkv.cli.gather import lengths
from oscarkv.evaluation.needle_prompts import KINDS, Context, Haystack

#: Beyond those of any table.
FIRST_SEED = 10_000
#: The longest answers (see `ROOM`) end within so many tokens.
ROOM = 40


@torch.no_grad()
def read(model: Any, cache: Cache, context: Context, chunk: int) -> None:
    """A context, and then a cache for each of its questions."""
    tokens = torch.tensor([context.tokens], device=model.device)
    for part in tokens.split(chunk, 1):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(context.trials))


@torch.no_grad()
def greedy(model: Any, context: Context, chunk: int) -> Tensor:
    """Full precision's answers [questions, ROOM]; what follows an answer's line is there too."""
    cache = DynamicCache(config=model.config)
    read(model, cache, context, chunk)
    tokens = torch.tensor([trial.question for trial in context.trials], device=model.device)
    made = []
    for _ in range(ROOM):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = logits.logits[:, -1].argmax(-1, keepdim=True)
        made.append(tokens)
    return torch.cat(made, 1)


def ends(tokenizer: Any, answers: Tensor, context: Context) -> list[int]:
    """Tokens of each answer up to the end of its line, or the room its kind has."""
    found = []
    for row, trial in zip(answers.tolist(), context.trials, strict=True):
        room = min(trial.room, ROOM)
        stop = (n for n in range(1, room) if "\n" in tokenizer.decode(row[:n]).lstrip())
        found.append(next(stop, room))
    return found


@torch.no_grad()
def predictions(model: Any, cache: Cache, context: Context, answers: Tensor, chunk: int) -> Tensor:
    """fp32 log probabilities [questions, ROOM, vocabulary] of every answer's tokens."""
    read(model, cache, context, chunk)
    questions = torch.tensor([trial.question for trial in context.trials], device=model.device)
    tokens = torch.cat([questions, answers], 1)
    read_out = model(
        input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=ROOM + 1
    )
    return torch.log_softmax(read_out.logits[:, :-1].float(), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--artifact", type=Path, nargs="+", required=True)
    parser.add_argument("--lengths", type=lengths, default=[4096])
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model, tokenizer = load_model(asked.model, dtype=asked.dtype, device=asked.device)
    haystack = Haystack(tokenizer, [path.read_text(encoding="utf-8") for path in asked.text])
    artifacts = {path.stem: load_artifact(path) for path in asked.artifact}
    rows: list[dict[str, Any]] = []
    for length in asked.lengths:
        for seed in range(FIRST_SEED, FIRST_SEED + asked.contexts):
            context = haystack.context(length, seed)
            answers = greedy(model, context, asked.chunk)
            stops = ends(tokenizer, answers, context)
            stock = DynamicCache(config=model.config)
            exact = predictions(model, stock, context, answers, asked.chunk)
            for name, artifact in artifacts.items():
                cache = OscarCache(model, artifact, backend=asked.backend)
                packed = predictions(model, cache, context, answers, asked.chunk)
                kl = (exact.exp() * (exact - packed)).sum(-1)
                differ = exact.argmax(-1) != packed.argmax(-1)
                for n, (trial, stop) in enumerate(zip(context.trials, stops, strict=True)):
                    rows.append(
                        {
                            "length": length,
                            "seed": seed,
                            "kind": trial.kind,
                            "setting": name,
                            "kl": float(kl[n, :stop].mean()),
                            "differs": bool(differ[n, :stop].any()),
                        }
                    )
        for name in artifacts:
            print(f"{length:6} {name:24} {artifacts[name].bits():.3f} bits", end="")
            for kind in KINDS:
                these = [
                    r
                    for r in rows
                    if (r["length"], r["kind"], r["setting"]) == (length, kind, name)
                ]
                kl = statistics.mean(r["kl"] for r in these)
                share = statistics.mean(r["differs"] for r in these)
                print(f"  {kind} {kl:.4f}, {share:.0%} differ", end="")
            print(flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
