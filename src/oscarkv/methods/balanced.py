"""Our recipe. Keys are stored in the basis where what the codes lose and what queries read meet
halfway: A = G^1/2 U H with G = C^-1 # M, the geometric mean of the inverse key covariance and the
query metric. Among all linear transforms it minimises stored energy times read-out noise gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import geometric_mean, hadamard, spd_power, unit_trace
from oscarkv.methods import transform
from oscarkv.methods.common import Side
from oscarkv.recipe import Recipe

PRESETS = (
    Recipe(),
    Recipe(name="compact", parameters="log8-symmetric"),
)


@transform("balanced", needs=("moments", "pairs"))
def fit(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    """Balanced key transform from the weighted pairs; statistics are averaged over positions."""
    assert side == "key", "the balanced transform is for keys"
    covariance, metric = centred_keys(statistics), statistics.read_queries.second_moment
    return balanced_transform(covariance, metric, recipe.ridge)


def centred_keys(statistics: LayerStatistics) -> Tensor:
    mean = statistics.read_keys.mean
    return statistics.read_keys.second_moment - mean[:, :, None] * mean[:, None, :]


def balanced_transform(covariance: Tensor, metric: Tensor, ridge: float) -> Tensor:
    """A for key covariances and query metrics [H, d, d]."""
    c, m = unit_trace(covariance, ridge), unit_trace(metric, ridge)
    root = spd_power(geometric_mean(torch.linalg.inv(c), m), 0.5)
    _, basis = torch.linalg.eigh(root @ c @ root)
    return root @ basis @ hadamard(c.shape[-1]).to(c.device)
