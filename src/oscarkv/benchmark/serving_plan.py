"""What an engine is asked to do in `oscarkv bench serving`. Plain data: it crosses processes."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from oscarkv.errors import OscarError

#: A line of a worker's output that is for us begins so; everything else is the engine's talk.
MARK = "@oscarkv "
OURS = "oscarkv"
VLLM, SGLANG = KINDS = ("vllm", "sglang")
#: How contexts come about: marked as computed, read, or the first for decode steps and the second
#: for times to first token.
COMPUTED, REAL, BOTH = PREFILLS = ("computed", "real", "both")
#: A step's time is taken between the 8th new token and the 72nd.
WARM_TOKENS = 8
STEPS = 64


def parse_length(text: str) -> int:
    """Tokens from "8192" or "8k"."""
    found = re.fullmatch(r"\s*(\d+)([kK]?)\s*", text)
    if not found or not int(found[1]):
        raise OscarError(f"{text!r} is no length; write for instance 16384 or 16k")
    return int(found[1]) * (1024 if found[2] else 1)


@dataclass(frozen=True)
class Shape:
    """Requests that decode at once, and how long they are when they begin."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        batch, times, context = text.partition("x")
        if not times or not batch.strip().isdigit() or not int(batch):
            raise OscarError(
                f"{text!r} is no batch x context; write for instance 32x16384 or 1x32k"
            )
        return cls(int(batch), parse_length(context))


@dataclass(frozen=True)
class Load:
    """Requests that arrive all at once."""

    requests: int
    context: int
    new_tokens: int


@dataclass(frozen=True)
class EnginePlan:
    """One engine, in one process."""

    name: str  # oscarkv, or the name of the engine's own attention
    model: str
    engine: dict[str, Any]  # arguments of vllm.LLM or sglang.Engine
    prefill: str  # one of PREFILLS
    vocabulary: int
    shapes: list[Shape] = field(default_factory=list)
    load: Load | None = None
    prompts: list[int] = field(default_factory=list)  # lengths whose first token is timed
    steps: int = STEPS
    repeats: int = 3
    kind: str = VLLM

    @property
    def connector(self) -> bool:
        """Whether contexts can be marked as computed."""
        return self.prefill != REAL

    @property
    def load_contexts(self) -> list[str]:
        return [COMPUTED, REAL] if self.prefill == BOTH else [self.prefill]

    @property
    def step_contexts(self) -> str:
        return COMPUTED if self.connector else REAL

    def room(self, shape: Shape) -> int:
        """New tokens that a request may make before the last of a batch has made its own: those
        that are read first decode while the others are read."""
        option = "max_num_batched_tokens" if self.kind == VLLM else "chunked_prefill_size"
        chunk = self.engine.get(option) or 2048
        reading = 0 if self.connector else shape.batch * (-(-shape.context // chunk) + 1)
        return WARM_TOKENS + self.steps + reading + 8

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        lengths = [shape.context + self.room(shape) for shape in self.shapes]
        lengths += [length + 1 for length in self.prompts]
        if self.load is not None:
            lengths.append(self.load.context + self.load.new_tokens)
        return max(lengths, default=0)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EnginePlan:
        data = json.loads(text)
        data["shapes"] = [Shape(**shape) for shape in data["shapes"]]
        data["load"] = None if data["load"] is None else Load(**data["load"])
        return cls(**data)
