"""The answers that a packed cache lost, beside those of full precision."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscarkv.evaluation.compare.sources import Comparison
from oscarkv.evaluation.needle import REFERENCE


@dataclass(frozen=True)
class Example:
    recipe: str
    where: str  # the task, or the kind of needle and where it lay
    wanted: str
    exact: str
    packed: str
    lost: float  # score of full precision less that of the recipe


def worst(comparison: Comparison, recipe: str, most: int = 4) -> list[Example]:
    """What was lost most, of tasks and of needles in turn; of equal losses, those whose texts are
    shortest: easiest to read."""
    sorts = []
    for examples in (_tasks(comparison, recipe), _needles(comparison, recipe)):
        lost = [example for example in examples if example.lost > 0]
        sorts.append(sorted(lost, key=lambda e: (-e.lost, len(e.exact) + len(e.packed))))
    turns = itertools.zip_longest(*sorts)
    return [example for turn in turns for example in turn if example is not None][:most]


def _tasks(comparison: Comparison, recipe: str) -> list[Example]:
    found = []
    for title, task, _ in comparison.task_records():
        for seed in task.seeds:
            exact = task.answers.get(REFERENCE, {}).get(str(seed), {})
            packed = task.answers.get(recipe, {}).get(str(seed), {})
            for problem in task.problems:
                a, b = exact.get(problem["id"]), packed.get(problem["id"])
                if a is not None and b is not None:
                    where = f"{title}, problem {problem['id']}"
                    target = str(problem["target"])
                    lost = a["score"] - b["score"]
                    found.append(Example(recipe, where, target, _said(a), _said(b), lost))
    return found


def _said(entry: Mapping[str, Any]) -> str:
    """Published records keep what was taken for the answer, or nothing but the score."""
    return str(entry.get("text", entry.get("answer", "(not kept)")))


def _needles(comparison: Comparison, recipe: str) -> list[Example]:
    found = []
    for trial in comparison.needles.trials if comparison.needles is not None else []:
        a, b = trial["answers"].get(REFERENCE), trial["answers"].get(recipe)
        if a is not None and b is not None:
            depth = "" if trial["depth"] is None else f" at {trial['depth']:.0%} depth"
            where = f"{trial['kind']} needle in {trial['length']:,} tokens{depth}"
            wanted = ", ".join(trial["targets"])
            lost = a["score"] - b["score"]
            found.append(Example(recipe, where, wanted, _said(a), _said(b), lost))
    return found


def moved(comparison: Comparison, recipe: str) -> tuple[int, int]:
    """Answers of all tasks and needles that got worse, and better."""
    changes = [e.lost for e in (*_tasks(comparison, recipe), *_needles(comparison, recipe))]
    return sum(x > 0 for x in changes), sum(x < 0 for x in changes)
