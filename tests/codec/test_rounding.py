"""Metric rounding: other codes for the same parameters, never worse under the metric."""

import pytest
import torch
from helpers import generator, random_spd
from torch import Tensor

from oscarkv.codec import RowCodec
from oscarkv.codec.rounding import DAMPING

HEADS, ROWS, DIM = 2, 12, 64


def damped_error(rows: Tensor, decoded: Tensor, metric: Tensor) -> Tensor:
    share = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * DAMPING
    damped = (metric + share * torch.eye(DIM)).double()
    error = (decoded - rows).double()
    return torch.einsum("hnd,hde,hne->hn", error, damped, error)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fmt", ["fp16", "log8", "log8-symmetric"])
@pytest.mark.parametrize("bits", [2, 3])
def test_the_damped_metric_error_never_grows(bits: int, fmt: str, groups: int) -> None:
    rng = generator(bits)
    codec = RowCodec(bits, groups, fmt, "least-squares", 0.0, 0.0)
    rows = torch.randn(HEADS, ROWS, DIM, generator=rng)
    metric = torch.stack([random_spd(DIM, rng) for _ in range(HEADS)]).float()
    base = torch.full((HEADS, 1), 2.0**-10)
    codes, stored = codec.encode(rows, base)
    better, same = codec.encode(rows, base, metric)
    assert torch.equal(same, stored)
    assert better.dtype == torch.uint8
    assert int(better.max()) < codec.levels
    before = damped_error(rows, codec.decode(codes, stored, base), metric)
    after = damped_error(rows, codec.decode(better, stored, base), metric)
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.8 * float(before.sum())


def test_a_flat_metric_leaves_nearest_codes_alone() -> None:
    codec = RowCodec(2, 1, "fp16", "least-squares", 0.0, 0.0)
    rows = torch.randn(HEADS, ROWS, DIM, generator=generator(3))
    base = torch.ones(HEADS, 1)
    codes, stored = codec.encode(rows, base)
    eye = torch.eye(DIM).expand(HEADS, DIM, DIM)
    better, same = codec.encode(rows, base, eye)
    assert torch.equal(better, codes)
    assert torch.equal(same, stored)


def test_the_unbiasing_gain_survives() -> None:
    """Descending on the stretched grid would shrink the codes and bias the logits again."""
    codec = RowCodec(2, 1, "fp16", "least-squares", 0.0, 1.0)
    rng = generator(5)
    rows = torch.randn(HEADS, 400, DIM, generator=rng)
    metric = torch.stack([random_spd(DIM, rng) for _ in range(HEADS)]).float()
    base = torch.ones(HEADS, 1)
    codes, stored = codec.encode(rows, base, metric)
    decoded = codec.decode(codes, stored, base)
    read = torch.einsum("hnd,hde,hne->", rows, metric, decoded)
    size = torch.einsum("hnd,hde,hne->", rows, metric, rows)
    assert 0.97 < float(read / size) < 1.1
