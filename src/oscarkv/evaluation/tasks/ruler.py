"""RULER (Hsieh et al., arXiv 2404.06654): rows as its own generator writes them, or as the hub has
them.

`input` (on the hub `context` and `question`) is the prompt, `outputs` (`answer`) what an answer
must hold. The group is `task`; the generator writes a file for each task instead, and then it is
that file's name. `oscarkv eval needle` makes prompts of this kind itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from oscarkv.evaluation.tasks.answers import after_thinking
from oscarkv.evaluation.tasks.task import SOURCE, Hub, Problem, Row, Task, Verdict


def read(row: Row, index: int) -> Problem:
    group = str(row.get("task", row.get(SOURCE, "")))
    prompt = row["input"] if "context" not in row else f"{row['context']}\n{row['question']}\n"
    outputs = [str(output) for output in row["answer" if "context" in row else "outputs"]]
    if not outputs:
        raise ValueError("it has no outputs")
    length = f"/{row['length']}" if "length" in row else ""
    prefix = str(row.get("answer_prefix", ""))
    return Problem(f"{group}{length}/{row.get('index', index)}", f"{prompt}{prefix}",
                   outputs, group=group)  # fmt: skip


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    return problem.question


def score(text: str, problem: Problem) -> Verdict:
    """All must be there, each for its share; of the answers to a question, any one will do."""
    text = after_thinking(text).strip()
    found = [float(target.lower() in text.lower()) for target in problem.target]
    any_one = problem.group.startswith("qa")
    return Verdict(text, max(found) if any_one else sum(found) / len(found))


TASK = Task(
    name="ruler",
    title="RULER",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("simonjegou/ruler", "4096"),
    max_new_tokens=128,
    metric="share found",
)
