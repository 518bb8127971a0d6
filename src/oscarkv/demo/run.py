"""The demo's work: calibrate four recipes on one book, measure them on another, and generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from oscarkv.artifact import Artifact
from oscarkv.demo.generation import Generation, encode, first_difference
from oscarkv.demo.generation import generate as continue_prompt
from oscarkv.evaluation.fidelity import Fidelity, measure_fidelity
from oscarkv.integrations.transformers.calibrate import calibrate_many
from oscarkv.integrations.transformers.geometry import describe

RECIPES = ("balanced", "paper", "quarot-int2", "naive-int2")
#: The recipe that generates, beside the full-precision cache.
SHOWN = "balanced"
CALIBRATION_TEXT, EVALUATION_TEXT = "alice.txt", "botchan.txt"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """How much the demo does. On two CPU cores, FULL takes minutes."""

    tokens: int
    length: int
    windows: int
    prompts: int
    new_tokens: int


FULL = Plan(tokens=8192, length=2048, windows=2, prompts=3, new_tokens=64)
QUICK = Plan(tokens=4096, length=1024, windows=1, prompts=1, new_tokens=32)


@dataclass(frozen=True)
class Prompt:
    """A stretch of the evaluation book, and a question about it."""

    title: str
    start: str  # the passage begins here
    question: str
    inserted: str = ""  # a sentence put into the middle, where only packed tokens can tell of it


#: About 1400 tokens: with windows of 320, most of the passage is read from the codes.
PASSAGE_CHARACTERS = 6000
PROMPTS = (
    Prompt(
        "Find one sentence in the middle",
        "I accepted the position",
        "What is the secret number of the school library? Answer with the number.",
        inserted="The secret number of the school library is 7294.",
    ),
    Prompt(
        "Answer a question",
        "Then I gave up myself for lost",
        "Who is Kiyo, and how does she treat the narrator?",
    ),
    Prompt(
        "Summarise the passage",
        "Because of an hereditary recklessness",
        "Summarise the passage above in two sentences.",
    ),
)


@dataclass(frozen=True)
class Pair:
    """One prompt, continued with both caches."""

    title: str
    question: str
    note: str  # what was put into the passage, if anything
    stock: Generation
    packed: Generation

    @property
    def verdict(self) -> str:
        at = first_difference(self.stock.tokens, self.packed.tokens)
        count = len(self.stock.tokens)
        return f"all {count} tokens agree" if at is None else f"first difference at token {at + 1}"


@dataclass
class DemoResult:
    model: str
    geometry: Mapping[str, int]
    artifacts: Mapping[str, Artifact]
    fidelity: Fidelity
    pairs: Sequence[Pair]
    plan: Plan
    device: str
    seconds: float = 0.0


def book(name: str) -> str:
    return (files("oscarkv.demo") / "texts" / name).read_text(encoding="utf-8")


def calibrate(model: Any, tokenizer: Any, plan: Plan, progress: Progress) -> dict[str, Artifact]:
    artifacts = calibrate_many(
        model,
        tokenizer,
        [book(CALIBRATION_TEXT)],
        recipes=RECIPES,
        tokens=plan.tokens,
        length=plan.length,
        general=False,  # twice the tokens would be twice the wait
        progress=progress,
    )
    return dict(zip(RECIPES, artifacts, strict=True))


def measure(
    model: Any,
    tokenizer: Any,
    artifacts: Mapping[str, Artifact],
    plan: Plan,
    progress: Progress,
) -> Fidelity:
    return measure_fidelity(
        model,
        tokenizer,
        [book(EVALUATION_TEXT)],
        artifacts,
        length=plan.length,
        windows=plan.windows,
        progress=progress,
    )


def generate(
    model: Any,
    tokenizer: Any,
    artifacts: Mapping[str, Artifact],
    fidelity: Fidelity,
    plan: Plan,
    progress: Progress,
) -> DemoResult:
    text, pairs = book(EVALUATION_TEXT), []
    for index, prompt in enumerate(PROMPTS[: plan.prompts]):
        progress(index, plan.prompts, prompt.title)
        content = passage(prompt, text)
        ids = encode(tokenizer, content)
        stock, packed = (
            continue_prompt(model, tokenizer, ids, artifact, max_new_tokens=plan.new_tokens)
            for artifact in (None, artifacts[SHOWN])
        )
        pairs.append(Pair(prompt.title, prompt.question, prompt.inserted, stock, packed))
    identity = describe(model).identity
    geometry = {
        "layers": identity.layers,
        "kv_heads": identity.kv_heads,
        "head_dim": identity.head_dim,
    }
    return DemoResult(identity.name, geometry, artifacts, fidelity, pairs, plan, str(model.device))


def passage(prompt: Prompt, text: str) -> str:
    """The prompt's text: whole words of the book, the inserted sentence, the question."""
    start = text.index(prompt.start)
    content = text[start : start + PASSAGE_CHARACTERS].rsplit(" ", 1)[0]
    if prompt.inserted:
        middle = content.index(". ", len(content) // 2) + 2
        content = f"{content[:middle]}{prompt.inserted} {content[middle:]}"
    return f"{content}\n\n{prompt.question}"
