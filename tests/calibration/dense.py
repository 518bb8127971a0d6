"""Random attention calls, and their statistics computed the long way: dense and in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.calibration.statistics import AttentionCall


def random_call(
    seed: int = 0,
    *,
    heads: int = 2,
    group: int = 3,
    length: int = 40,
    dim: int = 8,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> AttentionCall:
    """Anisotropic, off-centre q, k, v, and the outputs that follow from them."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, offset: float) -> Tensor:
        mixing = torch.randn(count, dim, dim, generator=generator, dtype=torch.float64)
        x = torch.randn(count, length, dim, generator=generator, dtype=torch.float64) @ mixing
        return (x / dim**0.5 + offset).float()

    q, k, v = rows(heads * group, 0.2), rows(heads, 1.0), rows(heads, -0.5)
    call = AttentionCall(q, k, v, torch.empty(0), 0.4, soft_cap, sliding_window)
    outputs = torch.stack(
        [weights(call, head) @ v[head // group].double() for head in range(len(q))]
    )
    return AttentionCall(q, k, v, outputs.float(), 0.4, soft_cap, sliding_window)


def weights(call: AttentionCall, query_head: int) -> Tensor:
    """Attention probabilities [T, T] of one query head."""
    q, k = call.q[query_head].double(), call.k[query_head // call.group].double()
    logits = call.scale * q @ k.T
    if call.soft_cap is not None:
        logits = call.soft_cap * torch.tanh(logits / call.soft_cap)
    for t in range(len(q)):
        for j in range(len(k)):
            hidden = call.sliding_window is not None and j <= t - call.sliding_window
            if j > t or hidden:
                logits[t, j] = -torch.inf
    return torch.softmax(logits, 1)


@dataclass
class Pairs:
    """Weighted moments over the pairs that will be quantised, of one KV head."""

    keys: Tensor
    key_mean: Tensor
    queries: Tensor
    values: Tensor
    value_mean: Tensor


def pair_moments(calls: list[AttentionCall], head: int, sink: int, recent: int) -> Pairs:
    dim = calls[0].k.shape[2]
    sums = [torch.zeros(dim, dim).double() for _ in range(3)]
    firsts = [torch.zeros(dim).double() for _ in range(2)]
    total = squares = 0.0
    for call in calls:
        k, v = call.k[head].double(), call.v[head].double()
        for query_head in range(head * call.group, (head + 1) * call.group):
            p = weights(call, query_head)
            q = call.q[query_head].double()
            for t in range(len(q)):
                output = p[t] @ v
                for j in range(t + 1):
                    if j < sink or j > t - recent or p[t, j] == 0:
                        continue
                    square = float(p[t, j]) ** 2
                    w = square * float((v[j] - output).square().sum())
                    sums[0] += w * torch.outer(k[j], k[j])
                    sums[1] += w * torch.outer(q[t], q[t])
                    sums[2] += square * torch.outer(v[j], v[j])
                    firsts[0] += w * k[j]
                    firsts[1] += square * v[j]
                    total += w
                    squares += square
    return Pairs(
        sums[0] / total,
        firsts[0] / total,
        sums[1] / total,
        sums[2] / squares,
        firsts[1] / squares,
    )
