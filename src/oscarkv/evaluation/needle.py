"""Retrieval from long contexts: does a packed cache still find what full precision finds?

Every setting gets the same contexts and questions. A context is read in chunks, as a server reads
it, and then shared by all its questions, which are answered greedily in one batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from oscarkv.artifact import Artifact
from oscarkv.artifact.files import write_atomically
from oscarkv.errors import OscarError
from oscarkv.evaluation.needle_prompts import KINDS, Context, Haystack, Trial, score
from oscarkv.evaluation.paired import Gap, gap, wilson
from oscarkv.integrations.transformers.cache import OscarCache
from oscarkv.integrations.transformers.text import text_sha256

FORMAT = "oscarkv-needle-1"
REFERENCE = "full precision"
#: Questions that are answered at once: all of a context's. A stock cache holds a copy for each.
BATCH = 12

Progress = Callable[[int, int, str], None]


@dataclass
class Needles:
    """Everything that is saved. A trial: length, context, kind, depth, targets, and the answers
    of every setting with their scores."""

    model: str
    text_sha256: str
    chat: bool
    strict: bool
    chunk: int
    lengths: list[int]
    contexts: int
    settings: dict[str, dict[str, Any]]
    trials: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)  # "length/context" -> sha256
    about: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT

    def chosen(self, kind: str | None = None, length: int | None = None) -> list[dict[str, Any]]:
        return [
            trial
            for trial in self.trials
            if kind in (None, trial["kind"]) and length in (None, trial["length"])
        ]

    def gap(self, setting: str, kind: str | None = None, length: int | None = None) -> Gap | None:
        """Against full precision, over the trials that both have answered; contexts are what is
        resampled, since trials of one context are not independent."""
        trials = [
            trial
            for trial in self.chosen(kind, length)
            if setting in trial["answers"] and REFERENCE in trial["answers"]
        ]
        if not trials:
            return None
        return gap(
            [trial["answers"][REFERENCE]["score"] for trial in trials],
            [trial["answers"][setting]["score"] for trial in trials],
            groups=[f"{trial['length']}/{trial['context']}" for trial in trials],
        )

    def grid(self, setting: str, kind: str) -> dict[tuple[int, float], tuple[float, int]]:
        """(length, depth) -> mean score and trials; where a kind has one needle a trial."""
        cells: dict[tuple[int, float], list[float]] = {}
        for trial in self.chosen(kind):
            if trial["depth"] is not None and setting in trial["answers"]:
                found = trial["answers"][setting]["score"]
                cells.setdefault((trial["length"], trial["depth"]), []).append(found)
        return {cell: (sum(x) / len(x), len(x)) for cell, x in cells.items()}

    def summary(self) -> list[dict[str, Any]]:
        """A row for every setting, kind and length; for all kinds together, kind is "all"."""
        rows = []
        for setting in self.settings:
            for length in self.lengths:
                for kind in (*KINDS, None):
                    trials = [t for t in self.chosen(kind, length) if setting in t["answers"]]
                    if not trials:
                        continue
                    scores = [t["answers"][setting]["score"] for t in trials]
                    found = None if setting == REFERENCE else self.gap(setting, kind, length)
                    rows.append(
                        {
                            "setting": setting,
                            "length": length,
                            "kind": kind or "all",
                            "trials": len(trials),
                            "score": sum(scores) / len(scores),
                            "interval": wilson(round(sum(scores)), len(scores)),
                            "gap": None if found is None else asdict(found),
                        }
                    )
        return rows

    def save(self, path: str | Path) -> None:
        data = asdict(self) | {"summary": self.summary()}
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"

        def write(part: Path) -> None:
            part.write_text(text, encoding="utf-8")

        write_atomically(Path(path), write)


def load_needles(path: Path) -> Needles:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format", None) != FORMAT:
            raise OscarError(f"{path} is no record of needles")
        data.pop("summary", None)
        return Needles(**data)
    except OSError as error:
        raise OscarError(f"cannot read {path}: {error.strerror or error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise OscarError(f"{path} is damaged: {error}") from None


def measure_needles(
    model: Any,
    haystack: Haystack,
    settings: Mapping[str, Artifact | None],
    needles: Needles,
    *,
    backend: str = "auto",
    batch: int = BATCH,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Needles:
    """Answer what `needles` does not have yet; it is saved after every context of a setting.
    `settings`: an artifact each, None for full precision."""
    require_context(model, needles.lengths)
    total, done = len(needles.lengths) * needles.contexts * len(settings), 0
    for length in needles.lengths:
        for index in range(needles.contexts):
            context = haystack.context(length, index)
            trials = _trials(needles, context, length, index)
            for name, artifact in settings.items():
                if any(name not in trial["answers"] for trial in trials):
                    cache = _make_cache(model, artifact, needles.strict, backend)
                    how = (needles.strict, needles.chunk, batch)
                    texts = answer(model, haystack.tokenizer, cache, context, *how)
                    for trial, text in zip(trials, texts, strict=True):
                        found = score(text, trial["targets"])
                        trial["answers"][name] = {"text": text, "score": found}
                    if path is not None:
                        needles.save(path)
                done += 1
                if progress:
                    progress(done, total, f"{name}, {length} tokens")
    return needles


def require_context(model: Any, lengths: Sequence[int]) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    if limit and max(lengths) > limit:
        raise OscarError(f"--lengths {max(lengths)} is beyond the model's context of {limit}")


def _trials(needles: Needles, context: Context, length: int, index: int) -> list[dict[str, Any]]:
    """A context's trials in the record: new ones, or those of the run that is gone on with."""
    key = f"{length}/{index}"
    found = [t for t in needles.trials if (t["length"], t["context"]) == (length, index)]
    if found:
        if needles.prompts.get(key) != context.sha256:
            raise OscarError(
                "the file given with --json was made with other prompts (another text, tokenizer "
                "or version); move it away, or give another name"
            )
        return found
    made: list[dict[str, Any]] = [
        {
            "length": length,
            "context": index,
            "kind": trial.kind,
            "depth": trial.depth,
            "targets": trial.targets,
            "answers": {},
        }
        for trial in context.trials
    ]
    needles.prompts[key] = context.sha256
    needles.trials += made
    return made


def _make_cache(model: Any, artifact: Artifact | None, strict: bool, backend: str) -> Cache:
    if artifact is None:
        return DynamicCache(config=model.config)
    return OscarCache(model, artifact, strict=strict, backend=backend)


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: Any,
    cache: Cache,
    context: Context,
    strict: bool,
    chunk: int,
    batch: int = BATCH,
) -> list[str]:
    """Greedy answers to all of a context's questions, each up to the end of its line."""
    tokens = torch.tensor([context.tokens], device=model.device)
    # With `strict` the rule holds within a chunk as well: how a prompt is cut does not matter.
    for part in [tokens] if strict else tokens.split(chunk, 1):
        _read(model, part, cache)
    texts = []
    for start in range(0, len(context.trials), batch):
        last = start + batch >= len(context.trials)
        own = cache if last else copy.deepcopy(cache)
        texts += _ask(model, tokenizer, own, context.trials[start : start + batch])
    return texts


def _ask(model: Any, tokenizer: Any, cache: Cache, trials: Sequence[Trial]) -> list[str]:
    """Answers of one batch, which uses the cache up."""
    cache.batch_repeat_interleave(len(trials))
    questions = torch.tensor([trial.question for trial in trials], device=model.device)
    ends = _ends(model, tokenizer)
    made: list[list[int]] = [[] for _ in trials]
    texts = [""] * len(trials)
    rows = list(range(len(trials)))  # the trials that are still being answered
    logits = _read(model, questions, cache)
    while True:
        chosen = logits.argmax(-1)
        kept = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            if token not in ends:
                made[row].append(token)
                texts[row] = tokenizer.decode(made[row])
            # A line break before anything was said is not yet the end.
            ended = "\n" in texts[row].lstrip() or len(made[row]) >= trials[row].room
            if token not in ends and not ended:
                kept.append(place)
        if not kept:
            return [text.strip().split("\n")[0] for text in texts]
        if len(kept) < len(rows):
            places = torch.tensor(kept, device=model.device)
            cache.batch_select_indices(places)
            chosen, rows = chosen[places], [rows[place] for place in kept]
        logits = _read(model, chosen[:, None], cache)


def _read(model: Any, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits [batch, vocabulary] after the last token."""
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
        :, -1
    ]


def _ends(model: Any, tokenizer: Any) -> set[int]:
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, tokenizer.eos_token_id] if t is not None}


def fresh(
    model_name: str,
    texts: Sequence[str],
    lengths: Sequence[int],
    contexts: int,
    settings: dict[str, dict[str, Any]],
    *,
    chat: bool,
    strict: bool,
    chunk: int,
    about: dict[str, Any],
    earlier: Needles | None = None,
) -> Needles:
    """An empty record, or an earlier one that is to be gone on with, perhaps with more."""
    made = Needles(
        model=model_name,
        text_sha256=text_sha256(texts),
        chat=chat,
        strict=strict,
        chunk=chunk,
        lengths=sorted(lengths),
        contexts=contexts,
        settings=settings,
        about=about,
    )
    if earlier is None:
        return made
    for name in ("model", "text_sha256", "chat", "strict", "chunk"):
        if getattr(earlier, name) != getattr(made, name):
            raise OscarError(
                f"the file given with --json was made with another {name.replace('_', ' ')}; move "
                "it away, or give another name"
            )
    made.trials, made.prompts = earlier.trials, earlier.prompts
    made.lengths = sorted({*earlier.lengths, *made.lengths})
    made.contexts = max(earlier.contexts, made.contexts)
    made.settings = earlier.settings | made.settings
    return made
