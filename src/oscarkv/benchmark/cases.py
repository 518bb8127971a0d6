"""What is timed: every kernel over batch, context and geometry."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property

from oscarkv.cache.paged import ROLLBACK_TOKENS
from oscarkv.codec import PageLayout
from oscarkv.recipe import Recipe

#: The recipe that is timed unless another is named; the windows are those of every recipe's preset.
RECIPE = Recipe.named("balanced")
PAGE_SIZE = 64
#: Of queries, keys, values and windows.
ELEMENT_BYTES = 2

Shape = tuple[int, int, int]  # query heads, KV heads, head_dim


@dataclass(frozen=True)
class Case:
    """One step of one layer."""

    kind: str  # decode, write or prefill
    shape: Shape
    lengths: tuple[int, ...]  # of the sequences, this step's tokens included
    new: int = 1  # tokens a sequence in this step
    page_size: int = PAGE_SIZE
    folded: bool = False  # values come transformed, and nothing is undone
    note: str = ""
    quick: bool = False
    dense: str = ""  # why there is no BF16 kernel to compare with; empty: there is
    recipe: Recipe = RECIPE

    @property
    def name(self) -> str:
        """Such as `decode 32/8/128 32x32768`: heads and head_dim, batch and context."""
        shape = "/".join(map(str, self.shape))
        if self.kind == "decode":
            ragged = len(set(self.lengths)) > 1
            context = "ragged" if ragged else str(self.lengths[0])
            what = f"{len(self.lengths)}x{context}"
        elif self.kind == "write":
            what = f"{len(self.lengths)}x{self.new}"
        else:
            what = f"{self.new} over {self.lengths[0] - self.new}"
        recipe = self.recipe.name if self.recipe != RECIPE else ""
        return ", ".join(filter(None, (f"{self.kind} {shape} {what}", self.note, recipe)))

    @property
    def query_heads(self) -> int:
        return self.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.shape[1]

    @property
    def head_dim(self) -> int:
        return self.shape[2]

    @property
    def tokens(self) -> int:
        """New tokens of the step, over all sequences."""
        return self.new * len(self.lengths)

    @cached_property
    def layout(self) -> PageLayout:
        return PageLayout.of(self.recipe, self.head_dim, self.page_size)

    # -- what must move ----------------------------------------------------------------------

    @property
    def packed_bytes_per_token(self) -> int:
        layout = self.layout
        rows = layout.key_row.bytes + layout.value_row.bytes + 2 * layout.parameter_bytes
        return self.kv_heads * rows

    @property
    def exact_bytes_per_token(self) -> int:
        return self.kv_heads * 2 * self.head_dim * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        """Bytes that a layer's step cannot do without moving, each counted once.

        decode: the packed rows and the window rows that some query of the step reads, queries and
        output. write: keys and values, packed rows, window rows. prefill: as decode, and the
        chunk's keys and values.
        """
        query_bytes = 2 * self.tokens * self.query_heads * self.head_dim * ELEMENT_BYTES
        chunk_bytes = self.tokens * self.exact_bytes_per_token
        if self.kind == "write":
            windows = self.written_to_windows * len(self.lengths)
            packed = self.tokens * self.packed_bytes_per_token
            return chunk_bytes + packed + windows * self.exact_bytes_per_token
        packed = exact = 0
        for length in self.lengths:
            first = length - self.new  # position of the oldest query
            last = first if self.kind == "prefill" else length  # stored keys lie below
            oldest_recent = max(0, first - self.recipe.recent + 1)
            # The newest query reads packed what lies up to `recent` before it.
            newest_packed = min(length - 1 - self.recipe.recent, last - 1)
            packed += max(0, newest_packed + 1 - self.recipe.sink)
            sink = min(self.recipe.sink, last)
            exact += sink + max(0, last - max(sink, oldest_recent))
        moved = packed * self.packed_bytes_per_token + exact * self.exact_bytes_per_token
        return moved + query_bytes + (chunk_bytes if self.kind == "prefill" else 0)

    @property
    def written_to_windows(self) -> int:
        """New tokens of a sequence that get an exact copy: what a later step reads so."""
        if self.new <= ROLLBACK_TOKENS:
            return self.new
        return min(self.new, self.recipe.sink + self.recipe.recent)

    @property
    def touched_bytes(self) -> int:
        """What a call drags through the cache: also two d x d matrices a head, as fp16 at least."""
        return self.bytes + 2 * self.kv_heads * self.head_dim**2 * ELEMENT_BYTES

    @property
    def dense_bytes(self) -> int:
        """Bytes of BF16 keys and values that stand for the same tokens."""
        return sum(self.lengths) * self.exact_bytes_per_token

    @property
    def flops(self) -> int:
        """Of the two products of attention, causal."""
        pairs = sum(
            self.new * (length - self.new) + self.new * (self.new + 1) // 2
            for length in self.lengths
        )
        return 4 * pairs * self.query_heads * self.head_dim

    def small(self) -> Case:
        """The same kernel on little data, for comparison with the oracle."""
        new = min(self.new, 400)
        lengths = (2300, 350, 1100)[: len(self.lengths)]
        if self.lengths[0] == self.new:
            lengths = (new,)
        capped = (min(a, b) for a, b in zip(self.lengths, lengths, strict=False))
        kept = tuple(max(length, new) for length in capped)
        return replace(self, lengths=kept, new=new, note="", quick=False, dense="")


LLAMA: Shape = (32, 8, 128)
LONG, LARGE = 131072, 32768


def gpu_cases() -> list[Case]:
    """The table. Names are what `--only` looks at."""
    return [*_decode_cases(), *_write_cases(), *_prefill_cases()]


def _decode_cases() -> list[Case]:
    def uniform(
        shape: Shape, batch: int, context: int, *, page_size: int = PAGE_SIZE, new: int = 1,
        folded: bool = False, note: str = "", quick: bool = False,
    ) -> Case:  # fmt: skip
        lengths = (context,) * batch
        return Case("decode", shape, lengths, new, page_size, folded, note, quick)

    return [
        uniform(LLAMA, 1, LONG, quick=True),
        uniform(LLAMA, 8, LARGE, quick=True),
        uniform(LLAMA, 32, 8192, quick=True),
        uniform(LLAMA, 32, LARGE, quick=True),
        uniform(LLAMA, 64, 1024, quick=True),
        uniform(LLAMA, 256, 4096),
        uniform(LLAMA, 1, 4096),
        uniform((64, 8, 128), 32, LARGE),
        uniform((12, 2, 128), 32, LARGE),
        uniform((32, 8, 64), 32, LARGE),
        uniform((32, 8, 256), 32, LARGE),
        uniform(LLAMA, 8, LARGE, new=4, note="4 query tokens"),
        uniform(LLAMA, 32, LARGE, page_size=16, note="page size 16"),
        uniform(LLAMA, 32, LARGE, page_size=112, note="page size 112"),
        uniform(LLAMA, 32, LARGE, folded=True, note="values folded"),
        Case(
            "decode",
            LLAMA,
            log_uniform(32, 1024, 65536),
            note="1K to 64K",
            dense="SDPA takes ragged lengths only padded, which would not be fair to it",
        ),
    ]


def _write_cases() -> list[Case]:
    unlike = "a BF16 cache writes by copying"
    return [
        Case("write", LLAMA, (128,) * 256, quick=True, dense=unlike),
        Case("write", LLAMA, (128,), dense=unlike),
        Case("write", LLAMA, (8192,), new=8192, quick=True, dense=unlike),
    ]


def _prefill_cases() -> list[Case]:
    return [
        Case("prefill", LLAMA, (8192 + LARGE,), new=8192, quick=True),
        Case("prefill", LLAMA, (8192,), new=8192),
        Case("prefill", LLAMA, (2048 + LONG,), new=2048),
    ]


def cpu_cases() -> list[Case]:
    """Sizes that the torch backend does in a moment, to see that everything runs."""
    tiny: Shape = (4, 2, 64)
    unlike = "a BF16 cache writes by copying"
    return [
        Case("decode", tiny, (1024,) * 2),
        Case("decode", tiny, (512, 700), dense="ragged lengths"),
        Case("write", tiny, (64,) * 4, dense=unlike),
        Case("prefill", tiny, (512,), new=64),
    ]


def log_uniform(count: int, low: int, high: int) -> tuple[int, ...]:
    """The same ragged lengths every time."""
    rng = random.Random(0)
    return tuple(round(low * math.exp(rng.random() * math.log(high / low))) for _ in range(count))
