"""GSM8K: grade-school arithmetic in words (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from oscarkv.evaluation.tasks.answers import after_thinking, last_number, marked_number
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict


def read(row: Row, index: int) -> Problem:
    working, _, final = str(row["answer"]).rpartition("####")
    target = marked_number(f"#### {final}")
    if target is None:
        raise ValueError("its answer has no number after ####")
    # <<48/2=24>> was for a calculator; models learn to imitate it, and it says nothing here.
    working = re.sub(r"<<[^>]*>>", "", working).strip()
    return Problem(str(index), str(row["question"]).strip(), target, extra={"working": working})


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    shown = [
        f"Question: {example.question}\nAnswer: {example.extra['working']}\n#### {example.target}"
        for example in examples
    ]
    if chat and not examples:
        return (
            f"{problem.question}\n\nThink step by step. Write the final answer, a number alone, "
            "on the last line, after ####."
        )
    return "\n\n".join([*shown, f"Question: {problem.question}\nAnswer:"])


def score(text: str, problem: Problem) -> Verdict:
    text = after_thinking(text)
    found = marked_number(text) or last_number(text)
    return Verdict(found, float(found == problem.target))


TASK = Task(
    name="gsm8k",
    title="GSM8K",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("openai/gsm8k", "main"),
    stop=("Question:", "\n\n\n"),
    shots=8,
    max_new_tokens=400,
)
