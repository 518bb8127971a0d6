"""Facts hidden in real text, and the questions that only they answer.

The kinds follow RULER (Hsieh et al., arXiv 2404.06654); the sentences are ours. One context holds
the needles of several trials, so that it is read once for all of them:

    single      four facts, each the only one of its sort
    multikey    eight facts of one sort about eight things; four are asked for
    multivalue  two things with four numbers each; all four are asked for
    tracking    two chains of five variables, each set from the one before; all five are asked for
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.integrations.transformers.text import bos_prefix

KINDS = ("single", "multikey", "multivalue", "tracking")
#: Where facts that are asked for one by one may lie: shares of the text.
DEPTHS = tuple((2 * i + 1) / 20 for i in range(10))
#: Sorts of facts that occur once in a context.
SORTS = ("magic number", "door code", "licence number", "account number")
MANY, ASKED = 8, 4  # of the sort with many keys: in the text, and asked for
VALUES, CHAINS, CHAIN = 4, 2, 5
#: New tokens an answer may take; digits may be tokens of their own.
ROOM = {"single": 14, "multikey": 14, "multivalue": 56, "tracking": 56}

INTRODUCTION = (
    "Some facts are hidden in the following text. Read it carefully and keep them in mind: "
    "questions about them follow at the end.\n\n"
)
NOUNS = (
    "apple anchor badger barrel basket beacon beetle bottle branch bridge button camel candle "
    "canyon carpet castle cherry cobalt copper coral cotton cradle crater desert dragon ember "
    "falcon feather ferry forest fossil garden garnet ginger glacier guitar hammer harbor hazel "
    "helmet hollow island jacket jasper jungle kettle ladder lantern lemon lizard marble meadow "
    "mirror nectar needle oyster paddle parrot pepper pigeon pillow planet pocket prairie quartz "
    "rabbit ribbon river rocket saddle salmon shadow silver spider sponge squirrel statue summit "
    "temple thunder tunnel turtle valley velvet violin walnut whistle willow window winter"
).split()


@dataclass(frozen=True)
class Trial:
    """One question about a context. `depth`: of its needle, None where there are several."""

    kind: str
    depth: float | None
    question: list[int]
    targets: list[str]

    @property
    def room(self) -> int:
        return ROOM[self.kind]


@dataclass(frozen=True)
class Context:
    """A text with its needles, and the trials that ask about it. All prompts have one length."""

    tokens: list[int]
    trials: list[Trial]

    @property
    def sha256(self) -> str:
        whole = [self.tokens, *([t.question, t.targets] for t in self.trials)]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


class Haystack:
    """Real text as tokens, and the places where a sentence ends."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], chat: bool = False) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        for text in texts:
            self.tokens += self._ids(text.strip() + "\n\n")
        strings = {token: tokenizer.decode([token]) for token in set(self.tokens)}
        self._ends = {t for t, s in strings.items() if s.endswith((".", "!", "?", '."', ".)"))}
        self._head, self._tail = self._frame(chat)
        self._filler = self._ids("\n")[:1]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _frame(self, chat: bool) -> tuple[list[int], str]:
        """What stands before the text, and between the question and the answer."""
        if not chat:
            return bos_prefix(self.tokenizer) + self._ids(INTRODUCTION), "\nAnswer:"
        if not getattr(self.tokenizer, "chat_template", None):
            raise OscarError("this model's tokenizer has no chat template; leave out --chat")
        mark = "\x1fhere\x1f"
        whole = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": INTRODUCTION + mark}],
            add_generation_prompt=True,
            tokenize=False,
        )
        head, _, tail = whole.partition(mark)
        return self._ids(head), tail

    def context(self, length: int, seed: int) -> Context:
        """A context whose prompts have `length` tokens less the longest answer. The same seed
        gives the same facts at every length."""
        rng = random.Random(seed)
        needles, asked = _facts(rng)
        questions = [
            (kind, index, self._ids(f"\n\nQuestion: {question}{self._tail}{answer}"), targets)
            for kind, index, question, answer, targets in asked
        ]
        longest = max(len(ids) for _, _, ids, _ in questions)
        pieces = [self._ids(f" {needle}") for needle, _ in needles]
        room = length - len(self._head) - longest - max(ROOM.values()) - sum(map(len, pieces))
        if room < 256:
            raise OscarError(
                f"a context of {length} tokens has no room for its needles and some text around "
                "them; take 2048 or more"
            )
        if len(self.tokens) < room:
            raise OscarError(
                f"the text has {len(self.tokens)} tokens, a context of {length} needs {room}; "
                "give more --text or shorter --lengths"
            )
        start = self._sentence(rng.randrange(len(self.tokens) - room + 1), -1)
        text = self.tokens[start : start + room]
        tokens = self._head + self._insert(text, pieces, [depth for _, depth in needles])
        trials = [
            Trial(
                kind,
                None if index is None else needles[index][1],
                # Questions of equal length, so that they can be answered in one batch.
                self._filler * (longest - len(ids)) + ids,
                targets,
            )
            for kind, index, ids, targets in questions
        ]
        return Context(tokens, trials)

    def _sentence(self, position: int, step: int) -> int:
        """The next beginning of a sentence from here."""
        while 0 < position < len(self.tokens) and self.tokens[position - 1] not in self._ends:
            position += step
        return position

    def _insert(
        self, text: list[int], pieces: Sequence[list[int]], depths: Sequence[float]
    ) -> list[int]:
        places = []
        for piece, depth in zip(pieces, depths, strict=True):
            place = min(len(text), round(depth * len(text)))
            while place < len(text) and text[place - 1] not in self._ends:
                place += 1
            places.append((place, piece))
        made, last = [], 0
        for place, piece in sorted(places, key=lambda x: x[0]):
            made += text[last:place] + piece
            last = place
        return made + text[last:]


#: (kind, which needle or None, question, how the answer begins, what it must hold)
_Asked = tuple[str, int | None, str, str, list[str]]


def _facts(rng: random.Random) -> tuple[list[tuple[str, float]], list[_Asked]]:
    """Needles with their depths, and what is asked about them."""
    needles: list[tuple[str, float]] = []
    asked: list[_Asked] = []
    things = rng.sample(NOUNS, len(SORTS) + MANY + CHAINS)
    numbers = (str(x) for x in rng.sample(range(1_000_000, 10_000_000), 64))
    depths = rng.sample(DEPTHS, len(SORTS)) + rng.sample(DEPTHS, ASKED)
    for sort in SORTS:
        thing, number = things.pop(), next(numbers)
        asked.append(
            (
                "single",
                len(needles),
                f"What is the {sort} of the {thing}?",
                f" The {sort} of the {thing} is",
                [number],
            )
        )
        needles.append((f"The {sort} of the {thing} is {number}.", depths[len(needles)]))
    for index in range(MANY):
        thing, number = things.pop(), next(numbers)
        if index < ASKED:
            question = f"What is the password of the {thing}?"
            begins = f" The password of the {thing} is"
            asked.append(("multikey", len(needles), question, begins, [number]))
        depth = depths[len(needles)] if index < ASKED else rng.random()
        needles.append((f"The password of the {thing} is {number}.", depth))
    for _ in range(CHAINS):
        thing = things.pop()
        values = [next(numbers) for _ in range(VALUES)]
        needles += [
            (f"One of the lucky numbers of the {thing} is {value}.", rng.random())
            for value in values
        ]
        question = f"What are the {VALUES} lucky numbers of the {thing}?"
        begins = f" The {VALUES} lucky numbers of the {thing} are"
        asked.append(("multivalue", None, question, begins, values))
    for _ in range(CHAINS):
        names = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(CHAIN)]
        value = next(numbers)[:5]
        places = sorted(rng.random() for _ in range(CHAIN))  # a chain is read in its order
        sources = [value, *(f"VAR {name}" for name in names)]
        needles += [
            (f"VAR {name} = {source}.", place)
            for name, source, place in zip(names, sources, places, strict=False)
        ]
        question = f"Which {CHAIN} variables have the value {value}, directly or through others?"
        begins = f" The {CHAIN} variables that have the value {value} are VAR"
        asked.append(("tracking", None, question, begins, names))
    return needles, asked


def score(text: str, targets: Sequence[str]) -> float:
    """The share of what was asked for that an answer holds."""
    return sum(target in text for target in targets) / len(targets)
