"""What an engine is asked, and what it answers. Plain data: it crosses processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from oscarkv.errors import OscarError

#: A fresh seed for each problem of each run, the same for every setting.
SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; greedy unless told otherwise."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise OscarError(
                f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k}: they "
                "are at least 0, above 0 and at most 1, and at least 0"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Request:
    key: str  # unique in a run
    tokens: list[int]
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    key: str
    text: str
    tokens: int
    finish: str  # "stop" or "length"


Take = Callable[[Answer], None]


class Engine(Protocol):
    """Something that answers requests, each handed over as soon as it is there."""

    def answer(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None: ...


def cut(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of its ends; engines differ in whether they keep them."""
    ends = [text.find(end) for end in stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]
