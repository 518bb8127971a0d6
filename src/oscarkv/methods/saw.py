"""SAW-INT4 (Jia et al., arXiv 2604.19157): 4 bits per token, keys turned by a Hadamard matrix in
blocks. It fits the packed format, so this is a recipe like any other, and not a simulation.

Blocks are of 128 channels, or the head where that is smaller; values are not turned. The 16-bit
scale and minimum of a head make it 4.25 bits at head_dim 128, as published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import hadamard
from oscarkv.methods import transform
from oscarkv.methods.common import PUBLISHED, Side

BLOCK = 128

PRESETS = (
    PUBLISHED.replace(name="saw-int4", key_bits=4, value_bits=4, key_transform="block-hadamard"),
)


@transform("block-hadamard")
def fit(statistics: LayerStatistics, side: Side, recipe: object) -> Tensor:
    heads, dim = statistics.shape
    block = BLOCK if dim % BLOCK == 0 else dim
    turns = torch.block_diag(*[hadamard(block)] * (dim // block))
    return turns.to(statistics.device).expand(heads, dim, dim)
