"""What a task is: rows become problems, problems become prompts, texts become scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
#: The field of a row that is the name of the file it is from.
SOURCE = "_source"


@dataclass(frozen=True)
class Problem:
    """One question and what is known about its answer. Plain data."""

    id: str
    question: str
    target: Any
    group: str = ""  # subject or subtask
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What was found in an answer, and how good it is: 0 to 1."""

    answer: str | None
    score: float
    note: str = ""  # why nothing could be scored, where that is so


@dataclass(frozen=True)
class Hub:
    """Where the hub has the data."""

    dataset: str
    name: str | None = None
    split: str = "test"
    #: JSON lines in it, by path (ARCHIVE!PATH inside an archive), of data sets that are scripts:
    #: `datasets` no longer runs those.
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One benchmark. `ask` writes a prompt: (problem, examples, chat) -> text; with `chat` it is
    the user's message, without it is text to be continued."""

    name: str
    title: str
    read: Callable[[Row, int], Problem]
    ask: Callable[[Problem, Sequence[Problem], bool], str]
    score: Callable[[str, Problem], Verdict]
    hub: Hub
    stop: tuple[str, ...] = ()  # ends an answer in text that is continued
    shots: int = 0
    max_new_tokens: int = 512
    shorten: bool = False  # a prompt that is too long loses its middle
    runs_code: bool = False
    metric: str = "accuracy"
