"""lm-eval's tasks on our engines: its prompts, filters and measures, our caches, paired samples.

Tasks that generate only: a packed cache matters where text is read back from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oscarkv.errors import MissingDependencyError, OscarError
from oscarkv.evaluation.tasks.record import TaskRecord, prompts_sha256
from oscarkv.evaluation.tasks.requests import (
    Answer,
    Engine,
    Request,
    Sampling,
    cut,
)

#: `lm-eval:NAME` in a list of tasks.
PREFIX = "lm-eval:"
#: Where a task does not say how long an answer may be.
DEFAULT_NEW_TOKENS = 256


def require_same(
    names: Sequence[str],
    tasks: Mapping[str, TaskRecord],
    sampling: Sampling | None,
    max_new_tokens: int | None,
) -> None:
    """Refuse to go on with answers that were sampled otherwise, before any more are asked for. A
    group's tasks are not known by its name: `_take` looks at those."""
    for name in names:
        if (task := tasks.get(f"{PREFIX}{name}")) is not None:
            _require_same(task, f"{PREFIX}{name}", _how(sampling, max_new_tokens))


def _require_same(task: TaskRecord, name: str, how: Mapping[str, Any]) -> None:
    """Older records do not have everything; that is not compared."""
    differing = [key for key in how if key in task.about and task.about[key] != how[key]]
    if differing:
        raise OscarError(
            f"the file given with --json holds answers of {name} with another "
            f"{', '.join(differing)}; move it away, or give another name"
        )


def _how(sampling: Sampling | None, max_new_tokens: int | None) -> dict[str, Any]:
    """What answers depend on beside their prompts."""
    return {
        "sampling": None if sampling is None else asdict(sampling),
        "max_new_tokens": max_new_tokens,  # None: the task's own
    }


def evaluate(
    names: Sequence[str],
    engine: Engine,
    tokenizer: Any,
    setting: str,
    tasks: dict[str, TaskRecord],
    *,
    context: int,
    shots: int | None,
    limit: int | None,
    chat: bool,
    max_new_tokens: int | None,
    seed: int,
    sampling: Sampling | None,
    include_path: Path | None,
    run_code: bool,
) -> None:
    """Run lm-eval once, and take its samples into the record."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingDependencyError(
            f'{PREFIX}{names[0]} needs lm-eval: pip install "oscarkv[eval]"'
        ) from None
    model = _make_model(engine, tokenizer, context, max_new_tokens, seed, sampling)
    folder = None if include_path is None else str(include_path)
    try:
        results = simple_evaluate(
            model=model,
            tasks=list(names),
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            log_samples=True,
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=folder),
            confirm_run_unsafe_code=run_code,
        )
    except (KeyError, ValueError, ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OscarError(f"lm-eval: {type(error).__name__}: {reason}") from None
    for name, samples in (results or {}).get("samples", {}).items():
        how = _how(sampling, max_new_tokens)
        _take(tasks, f"{PREFIX}{name}", setting, seed, samples, how, shots)


def _take(
    tasks: dict[str, TaskRecord],
    name: str,
    setting: str,
    seed: int,
    samples: Sequence[dict[str, Any]],
    how: Mapping[str, Any],
    shots: int | None,
) -> None:
    """lm-eval gives a sample once for each of its filters: the first filter counts."""
    if not samples:
        return
    first = samples[0].get("filter", "none")
    chosen = [sample for sample in samples if sample.get("filter", "none") == first]
    metric = next(m for m in chosen[0]["metrics"] if isinstance(chosen[0][m], int | float | bool))
    sha = prompts_sha256([[ord(c) for c in str(s["arguments"])] for s in chosen])
    problems = [
        {"id": str(s["doc_id"]), "group": "", "target": str(s["target"])[:200]} for s in chosen
    ]
    about = {
        "title": name,
        "metric": f"{metric}, {first}",
        "data": "lm-eval",
        "shots": shots,
        **how,
    }
    task = tasks.setdefault(name, TaskRecord(about, problems, sha, []))
    if task.prompts_sha256 != sha:
        raise OscarError(f"{name} asks other questions than before; give another --json")
    _require_same(task, name, how)
    task.seeds = sorted({*task.seeds, seed})
    entries = task.entries(setting, seed)
    for sample in chosen:
        text = str(sample["resps"][0][0])
        entries[str(sample["doc_id"])] = {
            "text": text,
            "answer": str(sample["filtered_resps"][0])[:400],
            "score": float(sample[metric]),
            "tokens": None,
            "finish": "stop",
        }


def _make_model(
    engine: Engine,
    tokenizer: Any,
    context: int,
    max_new_tokens: int | None,
    seed: int,
    sampling: Sampling | None,
) -> Any:
    from lm_eval.api.model import LM

    class EngineModel(LM):  # type: ignore[misc]
        """What lm-eval asks, put to one of our engines."""

        @property
        def tokenizer_name(self) -> str:
            return str(getattr(tokenizer, "name_or_path", "tokenizer")).replace("/", "__")

        def chat_template(self, chat_template: Any = False) -> str:
            return getattr(tokenizer, "chat_template", None) or ""

        def apply_chat_template(self, history: Any, add_generation_prompt: bool = True) -> str:
            return str(
                tokenizer.apply_chat_template(
                    history, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )

        def loglikelihood(self, requests: Any) -> Any:
            raise OscarError("only tasks of lm-eval that generate text are measured here")

        loglikelihood_rolling = loglikelihood

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [_request(i, *r.args) for i, r in enumerate(requests)]
            found: dict[str, str] = {}

            def take(answer: Answer) -> None:
                found[answer.key] = answer.text

            chosen = sampling or Sampling()
            engine.answer(asked, chosen, take)
            return [cut(found[request.key], request.stop) for request in asked]

    def _request(index: int, text: str, options: dict[str, Any]) -> Request:
        until = options.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        most = max_new_tokens or int(options.get("max_gen_toks") or DEFAULT_NEW_TOKENS)
        tokens = list(
            tokenizer(text, add_special_tokens=_add_special(text), verbose=False)["input_ids"]
        )
        if context:
            most = min(most, max(1, context - 1))
            room = context - most
            if len(tokens) > room:  # as lm-eval does: the beginning goes
                tokens = tokens[-room:]
        return Request(
            str(index), tokens, most, seed * 1_000_003 + index, tuple(s for s in stop if s)
        )

    def _add_special(text: str) -> bool:
        """A chat template has written its own."""
        bos = getattr(tokenizer, "bos_token", None)
        return not (bos and text.startswith(bos))

    return EngineModel()
