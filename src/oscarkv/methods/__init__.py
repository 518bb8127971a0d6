"""One method, one small file: its presets, and how it fits a transform from statistics.

To add a method, add a file here that defines `PRESETS` (a tuple of Recipe) and, for a new kind of
transform, a function decorated with `@transform("name")`. Nothing else needs to know. A method that
does not fit the packed format defines `SIMULATIONS` instead (see `simulation.py`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from oscarkv.errors import RecipeError
from oscarkv.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from oscarkv.calibration.statistics import LayerStatistics
    from oscarkv.methods.common import Side
    from oscarkv.methods.simulation import Simulation

    Fit = Callable[[LayerStatistics, Side, Recipe], Tensor]

_TRANSFORMS: dict[str, _Transform] = {}


class _Transform:
    """How a named transform is fitted: fit(statistics, side, recipe) -> fp64 [H, d, d]."""

    def __init__(self, fit: Fit, needs: frozenset[str]) -> None:
        self.fit = fit
        self.needs = needs


def transform(name: str, needs: tuple[str, ...] = ()) -> Callable[[Fit], Fit]:
    """Register a transform. `needs`: "moments" for any statistics, "pairs" for the weighted ones,
    "scores" for the second pass of the published value target."""

    def register(fit: Fit) -> Fit:
        _TRANSFORMS[name] = _Transform(fit, frozenset(needs))
        return fit

    return register


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, Recipe], dict[str, Simulation]]:
    found: dict[str, Recipe] = {}
    simulated: dict[str, Simulation] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for preset in getattr(module, "PRESETS", ()):
            found[preset.name] = preset
        for method in getattr(module, "SIMULATIONS", ()):
            simulated[method.name] = method
    for preset in found.values():
        for name in (preset.key_transform, preset.value_transform):
            if name not in _TRANSFORMS:
                raise RecipeError(f"preset {preset.name!r} names an unknown transform {name!r}")
    return found, simulated


def presets() -> dict[str, Recipe]:
    """All named recipes."""
    return dict(_load()[0])


def simulations() -> dict[str, Simulation]:
    """All methods that can be measured, but not packed."""
    return dict(_load()[1])


#: Names with this ending keep only the tokens exact that the method's own paper keeps.
ALONE = "-alone"


def named(name: str) -> Recipe | Simulation:
    """A recipe or a simulated method, for measurements; `NAME-alone` has no windows of ours."""
    base = name.removesuffix(ALONE)
    if base in simulations():
        method = simulations()[base]
        return method.alone() if base != name else method
    if base == name or name in presets():
        return Recipe.named(name)
    return Recipe.named(base).replace(name=name, sink=0, recent=1)


def get_transform(name: str) -> _Transform:
    _load()
    if name not in _TRANSFORMS:
        known = ", ".join(sorted(_TRANSFORMS))
        raise RecipeError(f"unknown transform {name!r}; known: {known}")
    return _TRANSFORMS[name]


def needs(recipe: Recipe) -> frozenset[str]:
    """The statistics a recipe asks for; empty: it needs no data at all."""
    if recipe.exact:
        return frozenset()
    wanted: set[str] = set()
    for name in (recipe.key_transform, recipe.value_transform):
        wanted |= get_transform(name).needs
    if recipe.value_transform == "rotation" and recipe.value_target == "diag-scores":
        wanted.add("scores")
    if recipe.center or recipe.metric_rounding:
        wanted |= {"moments", "pairs"}
    if recipe.parameters != "fp16":
        wanted.add("moments")  # for the exponents of 8-bit scales
    return frozenset(wanted)
