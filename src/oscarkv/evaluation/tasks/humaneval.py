"""HumanEval: 164 functions to be completed, with tests (Chen et al., arXiv 2107.03374)."""

from __future__ import annotations

from collections.abc import Sequence

from oscarkv.evaluation.tasks.answers import after_thinking, code_blocks
from oscarkv.evaluation.tasks.sandbox import run_code
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict

SECONDS = 10.0


def read(row: Row, index: int) -> Problem:
    extra = {"test": str(row["test"]), "entry_point": str(row["entry_point"])}
    return Problem(str(row["task_id"]), str(row["prompt"]), extra["entry_point"], extra=extra)


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    if not chat:
        return problem.question
    return (
        "Complete this Python function. Answer with the whole function, its imports included, in "
        f"one fenced block of code.\n\n```python\n{problem.question.rstrip()}\n```"
    )


def score(text: str, problem: Problem) -> Verdict:
    program = program_of(text, problem)
    checks = f"{problem.extra['test']}\ncheck({problem.extra['entry_point']})\n"
    outcome = run_code(f"{program}\n\n{checks}", seconds=SECONDS)
    return Verdict(program, float(outcome.passed), "" if outcome.passed else outcome.why)


def program_of(text: str, problem: Problem) -> str:
    """The function as a program: continued text, or a block of code from a chat."""
    blocks = code_blocks(after_thinking(text))
    if not blocks:
        return problem.question + text
    definition = f"def {problem.extra['entry_point']}"
    whole = [block for block in blocks if definition in block]
    if not whole:
        return problem.question + blocks[-1]
    # The prompt's imports and helpers stand before the function, which the block defines again.
    head, _, _ = problem.question.partition(definition)
    return f"{head}\n{whole[-1]}"


TASK = Task(
    name="humaneval",
    title="HumanEval",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("openai/openai_humaneval"),
    stop=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```", "\nassert "),
    max_new_tokens=768,
    runs_code=True,
    metric="pass@1",
)
