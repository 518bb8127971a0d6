"""Streaming statistics of one layer: fp64 sums per KV head, whose size never grows with tokens.

Two kinds are kept, because recipes differ in what they look at:

- plain moments of every token: E[q q^T], E[k k^T], E[v v^T], E[o o^T] and means, as the published
  recipe uses them (its softmax target V^T S^T S V is the moment of the attention outputs o);
- moments over the pairs that will be quantised (key beyond the sink, older than the recent
  window), each weighted by p^2 |v - o|^2: how far an error in that logit moves the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscarkv.errors import CalibrationError

#: Queries of a sequence whose pairs are weighed; the others tell nothing new and cost time.
PAIR_QUERIES = 1024
#: Names of the moments that a layer's statistics hold.
MOMENTS = (
    "queries",
    "keys",
    "values",
    "outputs",
    "scored_values",
    "read_queries",
    "read_keys",
    "read_values",
)
#: Query rows (heads x positions) whose attention is held at a time.
ROW_BLOCK = 2048


@dataclass(frozen=True)
class AttentionCall:
    """q, k (after RoPE), v and outputs of one sequence in one layer: [heads, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: float
    soft_cap: float | None = None
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.k.shape[0]

    def readers(self, head: int) -> slice:
        """The query heads that read KV head `head`."""
        return slice(head * self.group, (head + 1) * self.group)


@dataclass
class PairBlock:
    """Attention of some queries of one KV head, with the pairs that will be quantised."""

    queries: Tensor  # [rows, d]
    weights: Tensor  # p, [rows, T]
    outputs: Tensor  # o, [rows, d]
    eligible: Tensor  # bool [rows, T]
    sensitivity: Tensor  # p^2 |v - o|^2 on eligible pairs, else 0: [rows, T]


@dataclass
class Moments:
    """Weighted sums of x x^T and x over rows."""

    second: Tensor  # [H, d, d]
    first: Tensor  # [H, d]
    weight: Tensor  # [H]

    @classmethod
    def zeros(cls, heads: int, dim: int, device: torch.device) -> Moments:
        def new(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(new(heads, dim, dim), new(heads, dim), new(heads))

    def add(self, head: int, rows: Tensor, weights: Tensor | None = None) -> None:
        x = rows.double()
        weighted = x if weights is None else x * weights.double()[:, None]
        self.second[head] += weighted.T @ x
        self.first[head] += weighted.sum(0)
        self.weight[head] += rows.shape[0] if weights is None else weights.double().sum()

    @classmethod
    def blend(cls, parts: Sequence[Moments]) -> Moments:
        """All parts with the same weight, but for those of a head that saw nothing."""
        seen = torch.stack([part.weight > 0 for part in parts]).double()
        second = torch.stack([part.second_moment for part in parts])
        first = torch.stack([part.mean for part in parts])
        return cls(
            (seen[..., None, None] * second).sum(0), (seen[..., None] * first).sum(0), seen.sum(0)
        )

    @property
    def second_moment(self) -> Tensor:
        return self.second / self.weight.clamp_min(1e-300)[:, None, None]

    @property
    def mean(self) -> Tensor:
        return self.first / self.weight.clamp_min(1e-300)[:, None]


@dataclass
class LayerStatistics:
    """Everything a method may ask about one layer."""

    layer: int
    sink: int
    recent: int
    pairs: bool  # whether the weighted pairs are wanted (they cost most of the time)
    queries: Moments = field(init=False)
    keys: Moments = field(init=False)
    values: Moments = field(init=False)
    outputs: Moments = field(init=False)
    scored_values: Moments = field(init=False)  # weighted by k^T E[q q^T] k: second pass
    read_queries: Moments = field(init=False)
    read_keys: Moments = field(init=False)
    read_values: Moments = field(init=False)
    tokens: int = 0
    started: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and head_dim."""
        heads, dim = self.keys.first.shape
        return heads, dim

    @property
    def device(self) -> torch.device:
        return self.keys.first.device

    @classmethod
    def blank(cls, layer: int, heads: int, dim: int, device: torch.device) -> LayerStatistics:
        """Statistics with nothing in them, for methods that need no data."""
        statistics = cls(layer, 0, 1, False)
        statistics._allocate(heads, dim, device)
        return statistics

    @classmethod
    def blend(cls, parts: Sequence[LayerStatistics]) -> LayerStatistics:
        """As if each part had as many tokens, and as much to be read in it, as every other."""
        one = parts[0]
        blended = cls(one.layer, one.sink, one.recent, one.pairs)
        for name in MOMENTS:
            setattr(blended, name, Moments.blend([getattr(part, name) for part in parts]))
        blended.tokens, blended.started = sum(part.tokens for part in parts), True
        return blended

    def observe(self, call: AttentionCall, generator: torch.Generator) -> None:
        """First pass: add one sequence."""
        self._check(call)
        if not self.started:
            self._allocate(call.k.shape[0], call.k.shape[2], call.k.device)
        self.tokens += call.k.shape[1]
        for head in range(call.k.shape[0]):
            self.queries.add(head, call.q[call.readers(head)].flatten(0, 1))
            self.outputs.add(head, call.o[call.readers(head)].flatten(0, 1))
            self.keys.add(head, call.k[head])
            self.values.add(head, call.v[head])
        positions = sample_positions(call.k.shape[1], self.sink, self.recent, generator)
        if not self.pairs or positions.numel() == 0:
            return
        for head in range(call.k.shape[0]):
            for block in pair_blocks(call, head, positions, self.sink, self.recent):
                w = block.sensitivity
                self.read_queries.add(head, block.queries, w.sum(1))
                self.read_keys.add(head, call.k[head], w.sum(0))
                squares = torch.where(block.eligible, block.weights.square(), 0.0)
                self.read_values.add(head, call.v[head], squares.sum(0))

    def observe_scores(self, call: AttentionCall) -> None:
        """Second pass of the published value target: needs the whole first pass's E[q q^T]."""
        metric = self.queries.second_moment
        for head in range(call.k.shape[0]):
            k = call.k[head].double()
            scores = ((k @ metric[head]) * k).sum(1)
            self.scored_values.add(head, call.v[head], scores)

    def _allocate(self, heads: int, dim: int, device: torch.device) -> None:
        for name in MOMENTS:
            setattr(self, name, Moments.zeros(heads, dim, device))
        self.started = True

    def _check(self, call: AttentionCall) -> None:
        for name, tensor in (("queries", call.q), ("keys", call.k), ("values", call.v)):
            if not bool(torch.isfinite(tensor).all()):
                raise CalibrationError(
                    f"layer {self.layer}: NaN or infinite {name}; the model overflows on this "
                    "text. Load it in bfloat16 or float32, or check the weights"
                )


def sample_positions(length: int, sink: int, recent: int, generator: torch.Generator) -> Tensor:
    """Sorted query positions that read some packed key, at most PAIR_QUERIES of them."""
    first = sink + recent
    count = length - first
    if count <= 0:
        return torch.empty(0, dtype=torch.long)
    if count <= PAIR_QUERIES:
        return torch.arange(first, length)
    # One from each of PAIR_QUERIES equal strips: even over the sequence, without aliasing.
    strips = torch.arange(PAIR_QUERIES) * count / PAIR_QUERIES
    jitter = torch.rand(PAIR_QUERIES, generator=generator) * count / PAIR_QUERIES
    return first + (strips + jitter).long().clamp_max(count - 1)


def pair_blocks(
    call: AttentionCall, head: int, positions: Tensor, sink: int, recent: int
) -> Iterator[PairBlock]:
    """Attention of the sampled queries of one KV head, a block of rows at a time."""
    k, v = call.k[head].float(), call.v[head].float()
    for chunk in positions.to(k.device).split(max(1, ROW_BLOCK // call.group)):
        queries = call.q[call.readers(head)][:, chunk].flatten(0, 1).float()
        yield attend_pairs(call, queries, k, v, chunk.repeat(call.group), sink, recent)


def attend_pairs(
    call: AttentionCall, queries: Tensor, k: Tensor, v: Tensor, t: Tensor, sink: int, recent: int
) -> PairBlock:
    """Exact attention of query rows at positions t, and the sensitivity of its packed pairs."""
    length = int(t.max()) + 1  # keys after the block's last query are seen by none
    logits = (queries * call.scale) @ k[:length].T
    if call.soft_cap is not None:
        logits = call.soft_cap * torch.tanh(logits / call.soft_cap)
    j = torch.arange(length, device=k.device)
    visible = j <= t[:, None]
    if call.sliding_window is not None:
        visible &= j > t[:, None] - call.sliding_window
    p = torch.softmax(logits.masked_fill_(~visible, -torch.inf), -1)
    o = p @ v[:length]
    distance = (
        v[:length].square().sum(1) - 2 * (o @ v[:length].T) + o.square().sum(1, keepdim=True)
    ).clamp_min_(0)
    eligible = visible & (j >= sink) & (j <= t[:, None] - recent)
    sensitivity = torch.where(eligible, p.square() * distance, 0.0)
    if length < k.shape[0]:
        pad = (0, k.shape[0] - length)
        p, eligible, sensitivity = (
            torch.nn.functional.pad(x, pad) for x in (p, eligible, sensitivity)
        )
    return PairBlock(queries, p, o, eligible, sensitivity)
