"""OSCAR as published (arXiv 2605.17757): rotations from what attention reads, R = U H P.

`paper` is what the reference implementation does, `paper-softmax` what the paper writes,
`paper-per-head` the authors' later repair. U are eigenvectors in ascending order, H is Sylvester's
Hadamard matrix, and P permutes columns: perm[br(i)] = i-th largest eigenvalue's index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import bit_reversal, hadamard, symmetric
from oscarkv.methods import transform
from oscarkv.methods.common import PUBLISHED, Side, per_layer
from oscarkv.recipe import Recipe

_PAPER = PUBLISHED.replace(
    name="paper",
    key_transform="rotation",
    value_transform="rotation",
    composition="UHP",
    key_target="queries",
    value_target="diag-scores",
    per_head=False,
    key_clip=0.96,
    value_clip=0.92,
)
PRESETS = (
    _PAPER,
    _PAPER.replace(name="paper-softmax", value_target="softmax", group_size=64),
    _PAPER.replace(name="paper-per-head", per_head=True),
)


@transform("rotation", needs=("moments",))
def fit(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    target = per_layer(_target(statistics, side, recipe), recipe.per_head)
    return compose(symmetric(target), recipe.composition)


def _target(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    """The second moment whose eigenvectors are U, [H, d, d]."""
    if side == "key":
        moments = statistics.queries if recipe.key_target == "queries" else statistics.keys
        return moments.second_moment
    if recipe.value_target == "values":
        return statistics.values.second_moment
    if recipe.value_target == "softmax":
        return statistics.outputs.second_moment
    # The weights are normalised to mean 1, which is what dividing by their sum does.
    return statistics.scored_values.second_moment


def compose(target: Tensor, composition: str) -> Tensor:
    """The product of the named factors, left to right, acting on row vectors."""
    dim = target.shape[-1]
    _, basis = torch.linalg.eigh(target)
    # Eigenvalues ascend, so the i-th largest is index d - 1 - i; it goes to column br(i).
    permutation = torch.empty(dim, dtype=torch.long)
    permutation[bit_reversal(dim)] = torch.arange(dim - 1, -1, -1)
    eye = torch.eye(dim, dtype=torch.float64, device=target.device)
    factors = {
        "U": basis,
        "H": hadamard(dim).to(target.device),
        "P": eye[:, permutation.to(target.device)],
    }
    rotation = eye.expand_as(target)
    for factor in composition:
        rotation = rotation @ factors[factor]
    return rotation
