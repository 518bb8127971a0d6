"""Whether a backend's results are right, on little data: the oracle in fp64 says what they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.benchmark.cases import Case
from oscarkv.benchmark.synthetic import SyntheticStep, make_step
from oscarkv.kernels.interface import AttentionBackend, LayerCache
from oscarkv.kernels.torch_backend import TorchBackend

#: Most that attention may differ from the oracle (norm of the difference over the norm), with
#: the output's own rounding to bf16 included, and most codes that may differ.
LARGEST_ERROR = 2e-3
LARGEST_SHARE = 1e-3


@dataclass(frozen=True)
class Accuracy:
    """`what` is "relative error" of an output or "codes that differ", the share of them."""

    what: str
    value: float
    limit: float

    @property
    def good(self) -> bool:
        return self.value <= self.limit  # NaN is not


def check(backend: AttentionBackend, case: Case, device: torch.device) -> Accuracy:
    """The case in small, on this backend and on the oracle, over the same bytes."""
    step = make_step(case.small(), device, seed=1)
    oracle = TorchBackend(torch.float64)
    for each in (backend, oracle):
        step.plan(each)
    if case.kind == "write":
        return _compare_writes(backend, oracle, step)
    step.out[0].fill_(math.nan)
    step.run(backend, 0)
    found, step.out[0] = step.out[0], torch.empty_like(step.q[0], dtype=torch.float64)
    step.run(oracle, 0)
    expected = step.out[0]
    error = float((found.double() - expected).norm() / expected.norm())
    return Accuracy("relative error", error, LARGEST_ERROR)


def _compare_writes(
    backend: AttentionBackend, oracle: TorchBackend, step: SyntheticStep
) -> Accuracy:
    layer = step.layers[0]
    blank = layer.history.clone(), layer.window.clone()
    step.run(backend, 0)
    written, windows = layer.history, layer.window
    layer.history, layer.window = blank
    step.run(oracle, 0)
    # Outside the slots both still hold the same random bytes.
    differing = sum(
        int((mine != its).sum())
        for mine, its in zip(codes(layer, written), codes(layer, layer.history), strict=True)
    )
    if not torch.equal(windows, layer.window):  # they are plain copies
        return Accuracy(
            "window rows that differ", float((windows != layer.window).any(-1).sum()), 0
        )
    written_codes = 2 * step.k[0].numel()
    return Accuracy("codes that differ", differing / written_codes, LARGEST_SHARE)


def codes(layer: LayerCache, history: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys and values, in a layer's pages or a copy of them."""
    keys, values, _, _ = layer.layout.sections(history)
    return layer.layout.key_row.unpack(keys), layer.layout.value_row.unpack(values)
