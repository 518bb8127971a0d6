"""What method files share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Side = Literal["key", "value"]


def per_layer(matrices: Tensor, per_head: bool) -> Tensor:
    """Average [H, d, d] over heads (and repeat it), unless every head keeps its own."""
    return matrices if per_head else matrices.mean(0, keepdim=True).expand_as(matrices)
