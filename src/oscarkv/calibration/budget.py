"""Bits by layer: within a budget, each bit goes where it takes away most.

What keys or values of a layer cost when they alone are rounded is measured elsewhere, on a model;
here are the rules. A part is one side of one layer, and may have one bit more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from oscarkv.artifact import Artifact
from oscarkv.recipe import NOMINAL_LENGTH, Recipe

SIDES = ("keys", "values")
#: More would serve keys that are not refined, and no part was found to need them.
MOST_BITS = 3

Part = tuple[int, str]  # layer, and one of SIDES


def parts_of(artifact: Artifact) -> list[Part]:
    """Which parts may have one bit more than the recipe gives them."""
    bits = (artifact.recipe.key_bits, artifact.recipe.value_bits)
    open_sides = [side for side, now in zip(SIDES, bits, strict=True) if now < MOST_BITS]
    return [(layer, side) for layer in sorted(artifact.layers) for side in open_sides]


def affordable(recipe: Recipe, head_dim: int, layers: int, budget: float) -> int:
    """How many parts of a model can have one bit more; negative: not even what all have fits."""
    exact = min(recipe.sink + recipe.recent, NOMINAL_LENGTH) / NOMINAL_LENGTH
    step = (1 - exact) / (2 * layers)
    left = budget - recipe.bits(head_dim)
    return int(left / step + 1e-9) if left >= 0 else -1


def choose(
    costs: dict[Part, float], count: int, cost_with_more: Callable[[Part], float]
) -> list[Part]:
    """The parts that gain most by one bit more, at most `count` of them.

    `costs` are those without it. `cost_with_more` is only asked where it could change the answer:
    at best a bit takes away all that a part costs.
    """
    gains: dict[Part, float] = {}
    chosen: list[Part] = []
    while len(chosen) < count:
        left = [part for part in costs if part not in chosen]
        best = max(left, key=lambda part: gains.get(part, costs[part]), default=None)
        if best is None or gains.get(best, costs[best]) <= 0:
            break
        if best in gains:
            chosen.append(best)
        else:
            gains[best] = costs[best] - cost_with_more(best)
    return chosen


def with_more(artifact: Artifact, parts: Collection[Part]) -> Artifact:
    """An artifact in which these parts have one bit more."""
    recipe = artifact.recipe
    layers = {layer for layer, _ in parts}
    return artifact.with_bits(
        {
            layer: (
                recipe.key_bits + ((layer, "keys") in parts),
                recipe.value_bits + ((layer, "values") in parts),
            )
            for layer in layers
        }
    )
