"""GPQA-Diamond: 198 questions of graduate science, four choices (Rein et al., arXiv 2311.12022)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from oscarkv.evaluation.tasks.answers import after_thinking, choice
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict

LETTERS = "ABCD"


def read(row: Row, index: int) -> Problem:
    right = str(row["Correct Answer"]).strip()
    options = [right, *(str(row[f"Incorrect Answer {n}"]).strip() for n in (1, 2, 3))]
    # The right one is first in the data: shuffled by the question's number, for all settings alike.
    random.Random(index).shuffle(options)
    return Problem(
        str(row.get("Record ID") or index),
        str(row["Question"]).strip(),
        LETTERS[options.index(right)],
        group=str(row.get("High-level domain", "")),
        extra={"options": options},
    )


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    options = zip(LETTERS, problem.extra["options"], strict=True)
    listed = "\n".join(f"{letter}) {option}" for letter, option in options)
    end = "" if chat else "\n\nReasoning:"
    return (
        f"{problem.question}\n\n{listed}\n\nThink step by step, then end with a line "
        f'"Answer: X", where X is one of the letters {", ".join(LETTERS)}.{end}'
    )


def score(text: str, problem: Problem) -> Verdict:
    found = choice(after_thinking(text), LETTERS)
    return Verdict(found, float(found == problem.target))


TASK = Task(
    name="gpqa-diamond",
    title="GPQA-Diamond",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("Idavidrein/gpqa", "gpqa_diamond", "train"),
    max_new_tokens=32768,
)
