"""AIME 2025: 30 competition problems whose answers are whole numbers from 0 to 999."""

from __future__ import annotations

import re
from collections.abc import Sequence

from oscarkv.evaluation.tasks.answers import after_thinking, boxed, last_number
from oscarkv.evaluation.tasks.math500 import INSTRUCTION
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict


def read(row: Row, index: int) -> Problem:
    digits = re.sub(r"\\circ|[^\d]", "", str(row["answer"]))
    if not digits:
        raise ValueError(f"the answer {row['answer']!r} is no whole number")
    return Problem(str(row.get("id", index)), str(row["problem"]).strip(), str(int(digits)))


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    end = "" if chat else "\n\nSolution:"
    return f"{problem.question}\n\nThe answer is a whole number. {INSTRUCTION}{end}"


def score(text: str, problem: Problem) -> Verdict:
    inside = boxed(after_thinking(text))
    found = None if inside is None else last_number(inside)
    return Verdict(found, float(found == problem.target))


TASK = Task(
    name="aime25",
    title="AIME 2025",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("math-ai/aime25"),
    max_new_tokens=32768,
)
