"""Synthetic steps, made on the device: random packed pages, and NaN in all that is not to be read.

Every tensor a kernel gets lies between guard bytes; page 0, unused pages, slots and rows that no
query of the step reads, and the padding of pages hold 0xFF, which is NaN in every float type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from helpers import relative_error
from torch import Tensor

from oscarkv.artifact import reader_of
from oscarkv.codec import PageLayout, RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.kernels import AttentionBackend, LayerCache, Transforms
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.linalg import hadamard
from oscarkv.recipe import Recipe

#: Relative error of a sequence's output, the output's own rounding (bf16: 1.7e-3) included.
BOUNDS = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-3}
GUARD_BYTES = 1 << 18
#: Rows of q and out behind the last token's, as a padded batch has them.
SPARE_ROWS = 3
UNLIMITED = 1 << 30


class Shape(NamedTuple):
    """What kernels are compiled for, and the number of heads."""

    head_dim: int = 128
    group_size: int | None = None
    parameters: str = "fp16"
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    gqa: int = 4
    kv_heads: int = 2
    bits: tuple[int, int] = (2, 2)
    refined: bool = True  # 2-bit keys in one group
    split: bool = False  # with a scale for each kind of channel

    def recipe(self, **knobs: int) -> Recipe:
        return Recipe(
            refine_keys=self.refined and self.group_size is None,
            split_scales=self.split,
            group_size=self.group_size,
            parameters=self.parameters,
            key_bits=self.bits[0],
            value_bits=self.bits[1],
            **knobs,
        )


class Guarded:
    """A tensor in the middle of bytes 0xFF."""

    def __init__(self, content: Tensor, guard: int = GUARD_BYTES) -> None:
        size = content.numel() * content.element_size()
        self.buffer = torch.full(
            (2 * guard + size,), 0xFF, dtype=torch.uint8, device=content.device
        )
        middle = self.buffer[guard : guard + size]
        self.tensor = middle.view(content.dtype).view(content.shape)
        self.tensor.copy_(content)
        self._guard = guard

    def intact(self) -> bool:
        guard = self._guard
        if not guard:
            return True
        return bool((self.buffer[:guard] == 0xFF).all() and (self.buffer[-guard:] == 0xFF).all())


@dataclass
class SyntheticStep:
    """A batch whose sequences have `counts` new tokens each, and what kernels read for it."""

    shape: Shape
    counts: list[int]
    clean: LayerCache  # random everywhere: the oracle's
    layer: LayerCache  # poisoned and guarded: the kernels'
    seq_lens: Tensor
    query_start_loc: Tensor
    history_table: Tensor
    window_table: Tensor
    q: Tensor  # [tokens + SPARE_ROWS, query heads, d]
    guard: int = GUARD_BYTES

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.seq_lens, self.query_start_loc, self.history_table, self.window_table

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def blank_out(self) -> Guarded:
        return Guarded(torch.full_like(self.q, math.nan), self.guard)

    def decode(self, backend: AttentionBackend, max_query_len: int | None = None) -> Tensor:
        """All rows of out; guards and spare rows are checked."""
        out = self.blank_out()
        longest = max(self.counts) if max_query_len is None else max_query_len
        backend.plan(*self.tables, max_query_len=longest)
        backend.decode(self.q, self.layer, out.tensor)
        assert out.intact()
        assert bool(out.tensor[self.tokens :].isnan().all())
        return out.tensor

    def expected(self) -> Tensor:
        oracle = TorchBackend(torch.float64)
        oracle.plan(*self.tables)
        q = self.q[: self.tokens]
        out = torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device)
        oracle.decode(q, self.clean, out)
        return out

    def worst(self, out: Tensor, expected: Tensor) -> float:
        """The largest relative error of a sequence."""
        parts = zip(out[: self.tokens].split(self.counts), expected.split(self.counts), strict=True)
        return max(relative_error(a, b) for a, b in parts)

    def check(self, backend: AttentionBackend, max_query_len: int | None = None) -> None:
        error = self.worst(self.decode(backend, max_query_len), self.expected())
        assert error <= BOUNDS[self.shape.dtype]


def make_step(
    shape: Shape,
    lengths: Sequence[int],
    counts: Sequence[int] | int = 1,
    *,
    device: torch.device,
    sink: int = 64,
    recent: int = 256,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    folded: bool = False,
    hadamard_values: bool = False,
    key_size: float = 1.0,
    value_size: float = 1.0,
    octaves: float = 0.0,
    query_outliers: float = 1.0,
    columns: int = 0,
    seed: int = 0,
    guard: int = GUARD_BYTES,
) -> SyntheticStep:
    """`lengths` count this step's tokens. Sizes multiply keys and values (logits stay as they are);
    scales of packed rows spread over +- `octaves`; two channels of the queries are larger by
    `query_outliers`; tables have at least `columns` columns."""
    counts = [counts] * len(lengths) if isinstance(counts, int) else list(counts)
    counts = [min(new, length) for new, length in zip(counts, lengths, strict=True)]
    rng = torch.Generator(device).manual_seed(seed)
    clean = make_layer(
        shape,
        rng,
        sizes=(key_size, value_size),
        octaves=octaves,
        recipe=shape.recipe(sink=sink, recent=recent),
        folded=folded,
    )
    clean.soft_cap, clean.sliding_window = soft_cap, sliding_window
    if hadamard_values:  # as `balanced` has it: without signs, not stretched
        basis = hadamard(shape.head_dim).float().to(device).expand_as(clean.transforms.key)
        both = {"value": basis.contiguous(), "value_inverse": basis.contiguous()}
        clean.transforms = replace(clean.transforms, **both)
    length = torch.tensor(lengths, device=device)[:, None]
    new = torch.tensor(counts, device=device)[:, None]
    packed, exact = readable(length, new, clean)
    owned = torch.arange(packed.shape[1], device=device) < length
    history_table, pages = shuffled_table(owned, shape.page_size, columns, rng)
    window_table, windows = shuffled_table(exact, PAGE_QUANTUM, columns, rng)
    fill_pages(clean, pages, windows, (key_size, value_size), octaves, rng)
    tokens = sum(counts)
    q = normal((tokens + SPARE_ROWS, shape.kv_heads * shape.gqa, shape.head_dim), rng) * 2
    q[..., [3, shape.head_dim // 2]] *= query_outliers
    q[tokens:] = math.nan
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    layer = poisoned(clean, packed, exact, history_table, window_table)

    def guarded(x: Tensor) -> Tensor:
        return Guarded(x, guard).tensor

    return SyntheticStep(
        shape,
        counts,
        clean,
        replace(
            layer,
            history=guarded(layer.history),
            window=guarded(layer.window),
            transforms=map_transforms(layer.transforms, guarded),
        ),
        guarded(length[:, 0].int()),
        guarded(starts.int()),
        guarded(history_table),
        guarded(window_table),
        guarded(q.to(shape.dtype)),
        guard,
    )


def readable(length: Tensor, new: Tensor, layer: LayerCache) -> tuple[Tensor, Tensor]:
    """Positions that a query of the step reads packed, and those whose exact rows are kept for the
    step, sliding window or not: bool [B, T]."""
    sliding = layer.sliding_window or UNLIMITED
    j = torch.arange(max(int(length.max()), 1), device=length.device)
    oldest = torch.maximum(j, length - new)  # the first query to see key j, and the last
    newest = torch.minimum(length - 1, j + sliding - 1)
    seen = (oldest <= newest) & (new > 0)
    packed = seen & (j >= layer.sink) & (newest >= j + layer.recent)
    kept = (j < length) & ((j < layer.sink) | (oldest < j + layer.recent))
    return packed, kept & (new > 0)


def shuffled_table(
    used: Tensor, size: int, columns: int, rng: torch.Generator
) -> tuple[Tensor, int]:
    """Pages, in any order, of the positions in use, 0 elsewhere; and how many pages there are,
    page 0 and a few spare ones included."""
    batch, positions = used.shape
    wide = max(columns, -(-positions // size) + 1)
    padded = used.new_zeros(batch, wide * size)
    padded[:, :positions] = used
    pages = padded.view(batch, wide, size).any(-1)
    count = int(pages.sum())
    table = torch.zeros(batch, wide, dtype=torch.int32, device=used.device)
    order = torch.randperm(count + 2, generator=rng, device=used.device).int()[:count]
    table[pages] = order + 1
    return table, count + 3


def poisoned(
    layer: LayerCache,
    packed: Tensor,
    exact: Tensor,
    history_table: Tensor,
    window_table: Tensor,
    poison: tuple[int, float] = (0xFF, math.nan),
) -> LayerCache:
    history = torch.full_like(layer.history, poison[0])
    window = torch.full_like(layer.window, poison[1])
    size = layer.layout.page_size
    b, j = packed.nonzero().unbind(1)
    pages, offsets = history_table[b, j // size].long(), j % size
    for copy, original in zip(
        layer.layout.sections(history), layer.layout.sections(layer.history), strict=True
    ):
        copy[pages, :, offsets] = original[pages, :, offsets]
    b, j = exact.nonzero().unbind(1)
    pages, offsets = window_table[b, j // PAGE_QUANTUM].long(), j % PAGE_QUANTUM
    window[pages, :, :, offsets] = layer.window[pages, :, :, offsets]
    return replace(layer, history=history, window=window, memo={})


# -- layers --------------------------------------------------------------------------------------


def make_layer(
    shape: Shape,
    rng: torch.Generator,
    *,
    recipe: Recipe | None = None,
    sizes: tuple[float, float] = (1.0, 1.0),
    octaves: float = 0.0,
    folded: bool = False,
    pages: int = 1,
) -> LayerCache:
    """A layer with random transforms and `pages` pages of each kind."""
    recipe = shape.recipe() if recipe is None else recipe
    dim = shape.head_dim
    layout = PageLayout.of(recipe, dim, shape.page_size)
    empty = torch.zeros(0, device=rng.device)
    layer = LayerCache(
        history=empty,
        window=empty.to(shape.dtype),
        transforms=make_transforms(shape, rng, sizes, folded, recipe),
        layout=layout,
        key_codec=RowCodec.for_keys(recipe, dim),
        value_codec=RowCodec.for_values(recipe, dim),
        sink=recipe.sink,
        recent=recipe.recent,
        scale=dim**-0.5 / sizes[0],
    )
    fill_pages(layer, pages, pages, sizes, octaves, rng)
    return layer


def make_transforms(
    shape: Shape, rng: torch.Generator, sizes: tuple[float, float], folded: bool, recipe: Recipe
) -> Transforms:
    """Hadamard matrices with random signs, a little stretched."""
    heads, dim = shape.kv_heads, shape.head_dim
    basis = hadamard(dim).float().to(rng.device)

    def rotation() -> Tensor:
        signs = torch.randint(2, (heads, 1, dim), device=rng.device, generator=rng) * 2 - 1
        return basis * signs

    key, value = rotation(), rotation()
    stretch = (torch.rand(2, heads, dim, 1, device=rng.device, generator=rng) - 0.5).exp()
    exponents = [round(math.log2(size)) - 10 for size in sizes]
    return Transforms(
        key=stretch[0] * key,
        query=reader_of(stretch[0] * key, recipe),
        key_mean=normal((heads, dim), rng) * sizes[0],
        value=None if folded else stretch[1] * value,
        value_inverse=None if folded else (value / stretch[1]).mT.contiguous(),
        value_mean=None if folded else normal((heads, dim), rng) * sizes[1],
        exponents=torch.tensor(exponents, dtype=torch.int32, device=rng.device)[:, None]
        .expand(2, heads)
        .contiguous(),
    )


def map_transforms(transforms: Transforms, function) -> Transforms:
    named = {f.name: getattr(transforms, f.name) for f in fields(transforms)}
    return Transforms(**{k: None if x is None else function(x) for k, x in named.items()})


def fill_pages(
    layer: LayerCache,
    pages: int,
    windows: int,
    sizes: tuple[float, float],
    octaves: float,
    rng: torch.Generator,
) -> None:
    """Random codes, parameters and exact rows."""
    heads, layout = layer.transforms.key.shape[0], layer.layout
    shape = (pages, heads, layout.bytes)
    layer.history = torch.randint(256, shape, dtype=torch.uint8, device=rng.device, generator=rng)
    *_, keys, values = layout.sections(layer.history)
    for side, section in enumerate((keys, values)):
        levels = 1 << (layout.key_bits, layout.value_bits)[side]
        exponent = int(layer.transforms.exponents[side, 0])
        fill_parameters(
            section, layout.parameter_format, levels, sizes[side], octaves, exponent, rng
        )
    window = normal((windows, heads, 2, PAGE_QUANTUM, layout.head_dim), rng)
    window *= torch.tensor(sizes, device=rng.device)[:, None, None]
    layer.window = window.to(layer.window.dtype)


def fill_parameters(
    section: Tensor,
    parameter_format: str,
    levels: int,
    size: float,
    octaves: float,
    exponent: int,
    rng: torch.Generator,
) -> None:
    """Scales about 0.3 sizes for 4 levels, offsets about half their range: uint8 [..., n]."""
    groups = (
        section.shape[-1] * 8 // {"fp16": 32, "log8": 16, "log8-symmetric": 8}[parameter_format]
    )
    shape = (*section.shape[:-1], groups)
    s = (torch.rand(shape, device=rng.device, generator=rng) + 1) * (0.8 * size / levels)
    s *= torch.exp2((torch.rand(shape, device=rng.device, generator=rng) * 2 - 1) * octaves)
    middle = torch.rand(shape, device=rng.device, generator=rng) * 0.4 - 0.2
    if parameter_format == "fp16":
        lo = s * ((levels - 1) / 2) * (middle - 1)
        section.copy_(torch.stack([s.half(), lo.half()], -1).view(torch.uint8).flatten(-2))
        return
    n = torch.round(16 * (s.log2() - exponent)).clamp(0, 255).to(torch.uint8)
    if parameter_format == "log8":
        z = torch.round(48 * (middle - 1)).to(torch.int8).view(torch.uint8)
        section.copy_(torch.stack([n, z], -1).flatten(-2))
    else:
        section.copy_(n)


def normal(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, device=rng.device, generator=rng)
