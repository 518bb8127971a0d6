"""Every setting answers the same prompts; what an earlier run has answered is kept."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks.record import Entry, TaskRecord, TasksRecord, prompts_sha256
from oscarkv.evaluation.tasks.requests import SEED_STRIDE, Answer, Engine, Request, Sampling, cut
from oscarkv.evaluation.tasks.task import Problem, Task

#: Seconds between two saves while answers come in.
SAVE_EVERY = 10.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TaskPlan:
    """One task, ready to be asked."""

    task: Task
    problems: Sequence[Problem]
    examples: Sequence[Problem]
    chat: bool
    max_new_tokens: int
    seeds: Sequence[int]
    sampling: Sampling
    data: str  # where the problems are from, for the record
    #: Arguments of the chat template, such as enable_thinking.
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def prompt_tokens(plan: TaskPlan, problem: Problem, tokenizer: Any) -> list[int]:
    text = plan.task.ask(problem, plan.examples, plan.chat)
    if not plan.chat:
        return list(tokenizer(text, verbose=False)["input_ids"])
    message = [{"role": "user", "content": text}]
    made = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True, **plan.template
    )
    return list(made["input_ids"])


def prepare(plan: TaskPlan, tokenizer: Any, context: int) -> tuple[TaskRecord, list[list[int]]]:
    """An empty record of a task, and its prompts. `context`: the model's, 0 if it has no end."""
    prompts = [prompt_tokens(plan, problem, tokenizer) for problem in plan.problems]
    if plan.task.shorten and context:
        room = context - plan.max_new_tokens
        prompts = [_shortened(tokens, room) for tokens in prompts]
    for problem, tokens in zip(plan.problems, prompts, strict=True):
        if context and len(tokens) >= context:
            raise OscarError(
                f"{plan.task.name}, problem {problem.id}: the prompt has {len(tokens)} tokens, the "
                f"model's context is {context}; use fewer --shots"
            )
    about = {
        "title": plan.task.title,
        "metric": plan.task.metric,
        "data": plan.data,
        "shots": len(plan.examples),
        "chat": plan.chat,
        "max_new_tokens": plan.max_new_tokens,
        "sampling": dataclasses.asdict(plan.sampling),
        "template": dict(plan.template),
    }
    problems = [
        {"id": p.id, "group": p.group, "target": _shown(p.target), "prompt_tokens": len(tokens)}
        for p, tokens in zip(plan.problems, prompts, strict=True)
    ]
    sha = prompts_sha256(prompts)
    return TaskRecord(about, problems, sha, list(plan.seeds)), prompts


def _shortened(tokens: list[int], room: int) -> list[int]:
    """The beginning and the end of a prompt that is too long: the question is in one of them."""
    if len(tokens) <= room:
        return tokens
    half = room // 2
    return tokens[: room - half] + tokens[-half:]


def _shown(target: Any) -> Any:
    """Long targets (tests of a program) stay out of the record."""
    return target if len(str(target)) <= 200 else f"{str(target)[:200]}..."


def merge(fresh: TaskRecord, earlier: TaskRecord | None, name: str) -> TaskRecord:
    """Take over the answers of an earlier run, which must have asked the same."""
    if earlier is None:
        return fresh
    same = earlier.prompts_sha256 == fresh.prompts_sha256
    differing = [
        key
        for key in ("max_new_tokens", "sampling")
        if earlier.about.get(key) != fresh.about.get(key)
    ]
    if not same or differing:
        what = "other prompts" if not same else f"another {', '.join(differing)}"
        raise OscarError(
            f"the file given with --json holds answers of {name} with {what}; move it away, or "
            "give another name"
        )
    fresh.answers = earlier.answers
    fresh.seeds = sorted({*earlier.seeds, *fresh.seeds})
    return fresh


def run_setting(
    setting: str,
    engine: Engine,
    plans: Sequence[TaskPlan],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    record: TasksRecord,
    *,
    context: int,
    path: Path | None,
    progress: Progress | None = None,
) -> None:
    """Have an engine answer what is missing, task after task; saved as it goes."""
    for sampling in dict.fromkeys(plan.sampling for plan in plans):
        chosen = [plan for plan in plans if plan.sampling == sampling]
        _run_together(setting, engine, chosen, sampling, prompts, record, context, path, progress)


def _run_together(
    setting: str,
    engine: Engine,
    plans: Sequence[TaskPlan],
    sampling: Sampling,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    record: TasksRecord,
    context: int,
    path: Path | None,
    progress: Progress | None,
) -> None:
    requests: list[Request] = []
    asked: dict[str, tuple[TaskPlan, Problem, int]] = {}
    for plan in plans:
        for seed in plan.seeds:
            done = record.tasks[plan.task.name].entries(setting, seed)
            pairs = zip(plan.problems, prompts[plan.task.name], strict=True)
            for index, (problem, tokens) in enumerate(pairs):
                if problem.id in done:
                    continue
                key = f"{plan.task.name}/{seed}/{problem.id}"
                asked[key] = plan, problem, seed
                most = min(
                    plan.max_new_tokens, problem.extra.get("max_new_tokens", plan.max_new_tokens)
                )
                room = context - len(tokens) if context else most
                requests.append(
                    Request(
                        key=key,
                        tokens=list(tokens),
                        max_new_tokens=min(most, room),
                        seed=seed * SEED_STRIDE + index,
                        stop=() if plan.chat else plan.task.stop,
                    )
                )
    total = sum(len(plan.problems) * len(plan.seeds) for plan in plans)
    finished, saved = total - len(requests), time.monotonic()

    def save() -> None:
        if path is not None:
            record.save(path)

    def keep(answer: Answer) -> None:
        nonlocal finished, saved
        plan, problem, seed = asked[answer.key]
        entry = _entry(plan, problem, answer)
        with lock:
            record.tasks[plan.task.name].entries(setting, seed)[problem.id] = entry
            finished += 1
            if progress:
                progress(finished, total, setting)
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()

    if progress:
        progress(finished, total, setting)
    lock, running = threading.Lock(), []
    # Tests of a program take their time: an engine must not wait for them.
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def take(answer: Answer) -> None:
            if asked[answer.key][0].task.runs_code:
                running.append(pool.submit(keep, answer))
            else:
                keep(answer)

        try:
            if requests:
                engine.answer(requests, sampling, take)
            for future in running:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            save()  # also what there is of a run that was broken off


def _entry(plan: TaskPlan, problem: Problem, answer: Answer) -> Entry:
    text = cut(answer.text, () if plan.chat else plan.task.stop)
    verdict = plan.task.score(text, problem)
    entry: Entry = {
        "text": text,
        "answer": verdict.answer,
        "score": verdict.score,
        "tokens": answer.tokens,
        "finish": answer.finish,
    }
    if verdict.note:
        entry["note"] = verdict.note
    return entry
