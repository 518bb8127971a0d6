"""Data-free rotations: QuaRot's Hadamard, and none at all."""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import hadamard
from oscarkv.methods import transform
from oscarkv.methods.common import Side
from oscarkv.recipe import EXACT_BITS, Recipe

_PLAIN = Recipe(
    name="naive-int2",
    key_transform="identity",
    value_transform="identity",
    parameters="fp16",
    center=False,
    average_positions=False,
    fit="minmax",
    key_gain=0.0,
    value_gain=0.0,
)
PRESETS = (
    _PLAIN,
    _PLAIN.replace(name="quarot-int2", key_transform="hadamard", value_transform="hadamard"),
    _PLAIN.replace(name="bf16", key_bits=EXACT_BITS, value_bits=EXACT_BITS),
)


@transform("hadamard")
def fit_hadamard(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    heads, dim = statistics.shape
    return hadamard(dim).to(statistics.device).expand(heads, dim, dim)


@transform("identity")
def fit_identity(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    heads, dim = statistics.shape
    eye = torch.eye(dim, dtype=torch.float64, device=statistics.device)
    return eye.expand(heads, dim, dim)
