"""Data-free rotations: QuaRot's Hadamard, and none at all."""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import hadamard
from oscarkv.methods import transform
from oscarkv.methods.common import PUBLISHED, Side
from oscarkv.recipe import EXACT_BITS, Recipe

PRESETS = (
    PUBLISHED.replace(name="naive-int2"),
    PUBLISHED.replace(name="quarot-int2", key_transform="hadamard", value_transform="hadamard"),
    PUBLISHED.replace(name="bf16", key_bits=EXACT_BITS, value_bits=EXACT_BITS),
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
