"""Bits go where they help most, and the budget holds."""

from collections.abc import Mapping

import pytest

from oscarkv.calibration.budget import Part, affordable, choose
from oscarkv.recipe import Recipe

COSTS = {
    (0, "keys"): (16.0, 4.0),
    (0, "values"): (1.0, 0.25),
    (1, "keys"): (4.5, 1.1),
    (1, "values"): (0.1, 0.2),  # noise: more bits never make it worse
}


def chosen(costs: Mapping[Part, tuple[float, float]], count: int) -> tuple[list[Part], list[Part]]:
    """What is chosen, and what was measured with more bits for it."""
    asked: list[Part] = []

    def more(part: Part) -> float:
        asked.append(part)
        return costs[part][1]

    return choose({part: cost for part, (cost, _) in costs.items()}, count, more), asked


def test_the_next_bit_goes_where_it_takes_away_most() -> None:
    order = [(0, "keys"), (1, "keys"), (0, "values")]
    for count in range(4):
        assert chosen(COSTS, count)[0] == order[:count]
    assert chosen(COSTS, 100)[0] == order  # none to a part that would not gain
    # What could not win is not measured: the values' whole cost is less than any gain here.
    assert chosen(COSTS, 2)[1] == order[:2]


def test_a_part_that_gains_little_gives_way() -> None:
    costs = {(0, "keys"): (8.0, 7.0), (1, "keys"): (4.0, 1.0)}
    assert chosen(costs, 1)[0] == [(1, "keys")]
    assert chosen({(0, "keys"): (1.0, 1.0)}, 5)[0] == []
    assert chosen({}, 5) == ([], [])


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("layers", [1, 3, 30, 94])
def test_the_budget_holds(head_dim: int, layers: int) -> None:
    recipe = Recipe.named("compact")
    count = affordable(recipe, head_dim, layers, 2.3)
    exact = 320 / 131072
    bits = recipe.bits(head_dim) + count * (1 - exact) / (2 * layers)
    assert bits <= 2.3 + 1e-9 < bits + (1 - exact) / (2 * layers)


def test_what_does_not_fit_at_all() -> None:
    assert affordable(Recipe.named("compact"), 16, 4, 2.3) == -1
    assert affordable(Recipe.named("compact"), 64, 4, Recipe.named("compact").bits(64)) == 0
