"""Values folded into a model's projections: they leave it transformed, and the cache need not.

v' = (v - m) B goes into W_V; B^-1, and m W_O as a bias, into W_O. Computed in fp64; what is left
is the rounding of other weights than the model was trained with.
"""

from __future__ import annotations

import torch
from torch import Tensor


def folded_values(
    weight: Tensor, bias: Tensor | None, value: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """W_V [H * d, hidden] and its bias -> those of transformed values. B [H, d, d], m [H, d]."""
    heads, dim = mean.shape
    value, mean = value.double(), mean.double()
    rows = weight.double().unflatten(0, (heads, dim))  # rows are channels of v
    offset = -mean if bias is None else bias.double().view(heads, dim) - mean
    folded = torch.einsum("hde,hdi->hei", value, rows).flatten(0, 1)
    return folded, torch.einsum("hd,hde->he", offset, value).flatten()


def folded_output(weight: Tensor, inverse: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """W_O [hidden, H * group * d] -> that of transformed values, and what its bias must gain."""
    heads, dim = mean.shape
    columns = weight.double().unflatten(1, (heads, -1, dim))
    restored = torch.einsum("hed,ohgd->ohge", inverse.double(), columns).flatten(1)
    return restored, torch.einsum("hd,ohgd->o", mean.double(), columns)
