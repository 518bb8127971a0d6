"""MATH-500: 500 competition problems of MATH (Lightman et al., arXiv 2305.20050)."""

from __future__ import annotations

from collections.abc import Sequence

from oscarkv.evaluation.tasks import latex
from oscarkv.evaluation.tasks.answers import after_thinking, boxed
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


def read(row: Row, index: int) -> Problem:
    return Problem(
        str(row.get("unique_id", index)),
        str(row["problem"]).strip(),
        str(row["answer"]),
        group=str(row.get("subject", "")),
        extra={"working": str(row.get("solution", "")).strip()},
    )


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    if chat and not examples:
        return f"{problem.question}\n\n{INSTRUCTION}"
    shown = [f"Problem: {e.question}\nSolution: {e.extra['working']}" for e in examples]
    head = [INSTRUCTION] if not examples else []
    return "\n\n".join([*head, *shown, f"Problem: {problem.question}\nSolution:"])


def score(text: str, problem: Problem) -> Verdict:
    found = boxed(after_thinking(text))
    return Verdict(found, float(latex.equal(found, problem.target)))


TASK = Task(
    name="math500",
    title="MATH-500",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("HuggingFaceH4/MATH-500"),
    stop=("Problem:",),
    max_new_tokens=2048,
)
