"""LongBench: tasks over long documents (Bai et al., arXiv 2308.14508).

Rows as the authors publish them, the subset's name in `dataset`. Prompts are our own and so is the
measure of similar code: scores compare settings, and are not those of the paper. lm-eval has its
prompts (`longbench`).
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from oscarkv.evaluation.tasks.answers import after_thinking
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict


def f1(text: str, target: str) -> float:
    """Overlap of words, as for SQuAD: without case, articles and punctuation."""
    found, wanted = _words(text), _words(target)
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(text: str, target: str) -> float:
    """F1 of the longest common subsequence of words."""
    a, b = text.lower().split(), target.lower().split()
    row = [0] * (len(b) + 1)
    for word in a:
        last = 0
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], last + 1 if word == other else max(row[j], row[j - 1])
    common = row[-1]
    return 2 * common / (len(a) + len(b)) if common else 0.0


def contains(text: str, target: str) -> float:
    return float(target.strip().lower() in text.lower())


def number(text: str, target: str) -> float:
    """The share of the numbers in an answer that are the right one."""
    found, wanted = re.findall(r"\d+", text), re.findall(r"\d+", target)
    return found.count(wanted[0]) / len(found) if found and wanted else 0.0


def code(text: str, target: str) -> float:
    """Likeness of the first line that is code."""
    lines = [x for x in text.strip().splitlines() if x.strip() and x.strip()[0] not in "`#/"]
    return difflib.SequenceMatcher(None, lines[0].strip() if lines else "", target.strip()).ratio()


def _words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


QA = "Answer the question from the text above, as briefly as possible."
#: Subset -> (instruction, measure, new tokens).
SUBSETS: dict[str, tuple[str, Callable[[str, str], float], int]] = {
    "narrativeqa": (QA, f1, 128),
    "qasper": (QA, f1, 128),
    "multifieldqa_en": (QA, f1, 64),
    "hotpotqa": (QA, f1, 32),
    "2wikimqa": (QA, f1, 32),
    "musique": (QA, f1, 32),
    "gov_report": ("Summarise the text above in one page.", rouge_l, 512),
    "qmsum": ("Answer the question about the meeting above in some sentences.", rouge_l, 512),
    "multi_news": ("Summarise the news above in one page.", rouge_l, 512),
    "trec": ("Name the type of the last question, as in the examples above.", contains, 64),
    "triviaqa": ("Answer the last question, as in the examples above.", f1, 32),
    "samsum": ("Summarise the last dialogue, as in the examples above.", rouge_l, 128),
    "passage_count": ("How many different paragraphs are there? Give the number.", number, 32),
    "passage_retrieval_en": ("Which paragraph is summarised here? Give its number.", number, 32),
    "lcc": ("Write the next line of the code above.", code, 64),
    "repobench-p": ("Write the next line of the code above.", code, 64),
}  # fmt: skip


def read(row: Row, index: int) -> Problem:
    subset = str(row["dataset"]).removesuffix("_e")
    if subset not in SUBSETS:
        raise ValueError(f"no subset {subset!r} is known here; known: {', '.join(SUBSETS)}")
    answers = [str(answer) for answer in row["answers"]]
    return Problem(
        f"{subset}/{row.get('_id', index)}",
        str(row["input"]),
        answers,
        group=subset,
        extra={"context": str(row["context"]), "max_new_tokens": SUBSETS[subset][2]},
    )


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    instruction, _, _ = SUBSETS[problem.group]
    end = "" if chat else "\n\nAnswer:"
    return f"{problem.extra['context']}\n\n{instruction}\n\n{problem.question}".rstrip() + end


def score(text: str, problem: Problem) -> Verdict:
    _, measure, _ = SUBSETS[problem.group]
    text = after_thinking(text).strip()
    if problem.group in ("trec", "triviaqa", "samsum"):
        text = text.split("\n")[0]
    return Verdict(text, max(measure(text, answer) for answer in problem.target))


TASK = Task(
    name="longbench",
    title="LongBench",
    read=read,
    ask=ask,
    score=score,
    hub=Hub("THUDM/LongBench", files=tuple(f"data.zip!data/{subset}.jsonl" for subset in SUBSETS)),
    max_new_tokens=512,
    shorten=True,
    metric="mean score",
)
