"""Random layers, a cache driven step by step, and dense fp64 attention as its oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscarkv.artifact import reader_of
from oscarkv.cache import PagedCache, Step
from oscarkv.codec import PageLayout, RowCodec, parameters
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.linalg import hadamard
from oscarkv.recipe import Recipe


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def well_conditioned(heads: int, dim: int, rng: torch.Generator) -> Tensor:
    """Random invertible matrices fp64 [heads, d, d], condition number about 10."""
    noise = torch.randn(heads, dim, dim, generator=rng, dtype=torch.float64)
    basis, _ = torch.linalg.qr(noise)
    stretch = torch.exp(torch.linspace(-1.1, 1.1, dim, dtype=torch.float64))
    return basis * stretch @ hadamard(dim)


def random_spd(dim: int, rng: torch.Generator, decades: float = 3.0) -> Tensor:
    """A random covariance fp64 [d, d] whose eigenvalues span some decades."""
    basis, _ = torch.linalg.qr(torch.randn(dim, dim, generator=rng, dtype=torch.float64))
    values = torch.logspace(0, -decades, dim, dtype=torch.float64)
    return basis * values @ basis.T


def make_transforms(
    heads: int,
    dim: int,
    seed: int,
    *,
    recipe: Recipe | None = None,
) -> Transforms:
    rng = generator(seed)
    key, value = (well_conditioned(heads, dim, rng) for _ in range(2))
    means = torch.randn(2, heads, dim, generator=rng)
    metrics = torch.stack([random_spd(dim, rng) for _ in range(heads)]).float()
    return Transforms(
        key=key.float(),
        query=reader_of(key, recipe or Recipe(refine_keys=False)).float(),
        key_mean=means[0],
        value=value.float(),
        value_inverse=torch.linalg.inv(value).float(),
        value_mean=means[1],
        exponents=torch.randint(-11, -8, (2, heads), generator=rng, dtype=torch.int32),
        metric=metrics if recipe is not None and recipe.metric_rounding else None,
    )


def make_layer(
    recipe: Recipe,
    head_dim: int = 64,
    kv_heads: int = 2,
    page_size: int = 16,
    seed: int = 0,
    *,
    pages: int = 1,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> LayerCache:
    """A layer with random transforms and `pages` zeroed pages of each kind."""
    layout = PageLayout.of(recipe, head_dim, page_size)
    return LayerCache(
        history=torch.zeros(pages, kv_heads, layout.bytes, dtype=torch.uint8),
        window=torch.zeros(pages, kv_heads, 2, PAGE_QUANTUM, head_dim),
        transforms=make_transforms(kv_heads, head_dim, seed, recipe=recipe),
        layout=layout,
        key_codec=RowCodec.for_keys(recipe, head_dim),
        value_codec=RowCodec.for_values(recipe, head_dim),
        sink=recipe.sink,
        recent=recipe.recent,
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
    )


def round_trip(x: Tensor, layer: LayerCache, side: str) -> Tensor:
    """What the codec makes of keys or values [n, H, d], through the inverse transform: fp64."""
    t = layer.transforms
    is_key = side == "key"
    forward, mean = (t.key, t.key_mean) if is_key else (t.value, t.value_mean)
    inverse = t.query.mT if is_key else t.value_inverse
    codec = layer.key_codec if is_key else layer.value_codec
    base = parameters.bases(t.exponents[0 if is_key else 1])
    rows = torch.einsum("nhd,hde->nhe", x.double() - mean.double(), forward.double()).float()
    codes, stored = codec.encode(rows, base)
    s, lo = parameters.load(stored, codec.parameter_format, codec.levels, base[:, None])
    grouped = codes.unflatten(-1, (codec.groups, -1)).double()
    decoded = (s.double()[..., None] * grouped + lo.double()[..., None]).flatten(-2)
    return torch.einsum("nhd,hde->nhe", decoded, inverse.double()) + mean.double()


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, exact_from: int | None = None
) -> Tensor:
    """Attention of the last len(q) tokens over k, v [T, H, d], one query head at a time.

    The query at t takes key j as it is where j < sink or j > t - recent (or j >= exact_from),
    and otherwise as the codec would give it back.
    """
    length, heads, _ = k.shape
    group = q.shape[1] // heads
    packed_k, packed_v = round_trip(k, layer, "key"), round_trip(v, layer, "value")
    j, t = torch.arange(length), torch.arange(length - q.shape[0], length)[:, None]
    exact = (j < layer.sink) | (j > t - layer.recent)
    if exact_from is not None:
        exact = exact | (j >= exact_from)
    visible = j <= t
    if layer.sliding_window is not None:
        visible = visible & (j > t - layer.sliding_window)
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        kv, query = head // group, q[:, head].double()
        logits = torch.where(exact, query @ k[:, kv].double().T, query @ packed_k[:, kv].T)
        logits = logits * layer.scale
        if layer.soft_cap is not None:
            logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
        p = torch.softmax(logits.masked_fill(~visible, -math.inf), -1)
        out[:, head] = (p * exact) @ v[:, kv].double() + (p * ~exact) @ packed_v[:, kv]
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    error = float((actual.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error  # max() would pass over NaN


@dataclass
class Rig:
    """One layer, its paged cache, a backend, and a plain record of every token written."""

    layer: LayerCache
    group: int = 1  # query heads per KV head
    sequences: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64
    cache: PagedCache = field(init=False)
    record: list[tuple[Tensor, Tensor]] = field(init=False)  # k, v [T, H, d] of each sequence

    def __post_init__(self) -> None:
        layer = self.layer
        self.cache = PagedCache(
            [layer], sink=layer.sink, recent=layer.recent, page_size=layer.layout.page_size
        )
        self.cache.add(self.sequences)
        self.backend = TorchBackend(self.dtype)
        self.rng = generator(self.seed)
        empty = torch.empty(0, layer.kv_heads, layer.layout.head_dim)
        self.record = [(empty, empty) for _ in range(self.sequences)]

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, dim = self.layer.kv_heads, self.layer.layout.head_dim
        q = torch.randn(count, heads * self.group, dim, generator=self.rng) * 2
        k, v = torch.randn(2, count, heads, dim, generator=self.rng)
        return q, k, v

    def write(self, counts: Sequence[int], k: Tensor, v: Tensor, *, strict: bool = False) -> Step:
        """Append and write tokens that lie one after the other, sequence by sequence."""
        step = self.cache.append(counts)
        self.backend.plan(
            step.seq_lens, step.query_start_loc, step.history_table, step.window_table, strict
        )
        self.backend.write(k, v, step.history_slots, step.window_slots, self.layer)
        start = 0
        for index, count in enumerate(counts):
            chunk = slice(start, start + count)
            before_k, before_v = self.record[index]
            self.record[index] = (torch.cat([before_k, k[chunk]]), torch.cat([before_v, v[chunk]]))
            start += count
        return step

    def run(
        self,
        counts: Sequence[int],
        mode: str,
        tokens: tuple[Tensor, Tensor, Tensor] | None = None,
        *,
        strict: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One step -> q and the backend's output, [tokens, query heads, d]."""
        q, k, v = tokens or self.tokens(sum(counts))
        self.write(counts, k, v, strict=strict)
        out = torch.full(q.shape, math.nan, dtype=self.dtype)
        if mode == "decode":
            self.backend.decode(q, self.layer, out)
        else:
            self.backend.prefill(q, k, v, self.layer, out)
        return q, out

    def check(self, counts: Sequence[int], mode: str, *, strict: bool = False) -> float:
        """One step -> the largest relative error of a sequence against the oracle."""
        q, out = self.run(counts, mode, strict=strict)
        worst, start = 0.0, 0
        for (k, v), count in zip(self.record, counts, strict=True):
            rows = slice(start, start + count)
            own = k.shape[0] - count if mode == "prefill" and not strict else None
            expected = dense_attention(q[rows], k, v, self.layer, own)
            worst = max(worst, relative_error(out[rows], expected))
            start += count
        return worst

    def history(self, index: int) -> tuple[Tensor, ...]:
        """The packed bytes of one sequence's tokens: K codes, V codes, K and V parameters."""
        sequence = self.cache._sequences[index]
        pages = self.layer.history[torch.tensor(sequence.history, dtype=torch.long)]
        sections = self.layer.layout.sections(pages)  # [p, H, P, n] each
        return tuple(s.transpose(1, 2).flatten(0, 1)[: sequence.length] for s in sections)
