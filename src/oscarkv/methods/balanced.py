"""Our recipe. Keys are stored in the basis where what the codes lose and what queries read meet
halfway: A = G^1/2 U H with G = C^-1 # M, the geometric mean of the inverse key covariance and the
query metric. Among all linear transforms it minimises stored energy times read-out noise gain.

In that basis a few channels carry most of what is read. Bits go where they count (`refine_keys`):
the first quarter of the channels gets two digits, the last quarter none. A second digit of 2 bits
is a code like any other, read with a quarter of the first one's weight: readers notice nothing.

With `split_scales`, channels of two digits have a scale of their own in every token: where one kind
is large and the other small, neither has to do with the other's. Kinds are then groups, as in any
row with two: the unread quarter comes second, so that both are halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import geometric_mean, hadamard, spd_power, unit_trace
from oscarkv.methods import transform
from oscarkv.methods.common import Side
from oscarkv.recipe import Recipe

COMPACT = Recipe(name="compact", parameters="log8-symmetric")
PRESETS = (
    # What small parameters leave of 2.3 bits goes to the layers that need it.
    COMPACT.replace(name="balanced", budget=2.3),
    COMPACT,
    Recipe(),
    COMPACT.replace(name="precise", split_scales=True, key_gain=1.0),
    # What is looked up far back is lost by its keys first: a third bit leaves a quarter of that.
    COMPACT.replace(name="retrieval", key_bits=3),
)


@transform("balanced", needs=("moments", "pairs"))
def fit(statistics: LayerStatistics, side: Side, recipe: Recipe) -> Tensor:
    """Balanced key transform from the weighted pairs; statistics are averaged over positions."""
    assert side == "key", "the balanced transform is for keys"
    covariance, metric = centred_keys(statistics), statistics.read_queries.second_moment
    return balanced_transform(covariance, metric, recipe.ridge, recipe.refined, recipe.split)


def centred_keys(statistics: LayerStatistics) -> Tensor:
    mean = statistics.read_keys.mean
    return statistics.read_keys.second_moment - mean[:, :, None] * mean[:, None, :]


def balanced_transform(
    covariance: Tensor, metric: Tensor, ridge: float, refined: bool = False, split: bool = False
) -> Tensor:
    """A for key covariances and query metrics [H, d, d]."""
    c, m = unit_trace(covariance, ridge), unit_trace(metric, ridge)
    root = spd_power(geometric_mean(torch.linalg.inv(c), m), 0.5)
    energy, basis = torch.linalg.eigh(root @ c @ root)
    dim = c.shape[-1]
    if not refined:
        return root @ basis @ hadamard(dim).to(c.device)
    # From the most read channel to the least. Each class is mixed within itself and brought to
    # the same energy, since one scale serves all of a row's codes.
    sizes = [dim // 4, dim // 2, dim // 4]
    scales = [
        part.mean(-1, keepdim=True).rsqrt().expand_as(part)
        for part in energy.flip(-1).split(sizes, -1)
    ]
    mixing = torch.block_diag(*(hadamard(size) for size in sizes)).to(c.device)
    found = root @ (basis.flip(-1) * torch.cat(scales, -1).unsqueeze(-2)) @ mixing
    if not split:
        return found
    most, less, least = found.split(sizes, -1)
    return torch.cat([most, least, less], -1)
