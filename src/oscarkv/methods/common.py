"""What method files share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from oscarkv.recipe import Recipe

Side = Literal["key", "value"]


#: The published recipes' common ground: min/max ranges with 16-bit parameters, and no means.
PUBLISHED = Recipe(
    name="published",
    key_transform="identity",
    value_transform="identity",
    parameters="fp16",
    center=False,
    average_positions=False,
    refine_keys=False,
    fit="minmax",
    key_gain=0.0,
    value_gain=0.0,
)


def per_layer(matrices: Tensor, per_head: bool) -> Tensor:
    """Average [H, d, d] over heads (and repeat it), unless every head keeps its own."""
    return matrices if per_head else matrices.mean(0, keepdim=True).expand_as(matrices)
