"""What scripts/accuracy.py tries, and how much of it: recipes of each section, plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.linalg import geometric_mean, hadamard, spd_power, unit_trace
from oscarkv.methods import simulations, transform
from oscarkv.methods.balanced import centred_keys
from oscarkv.recipe import Recipe

UNIFORM, COMPACT, PAPER = (Recipe.named(n) for n in ("uniform", "compact", "paper"))

#: In the table of methods, in this order.
PACKED = (
    "balanced",
    "compact",
    "uniform",
    "precise",
    "retrieval",
    "paper",
    "paper-softmax",
    "paper-per-head",
    "quarot-int2",
    "naive-int2",
    "saw-int4",
    "bf16",
)


def paper_ablation(dim: int) -> dict[str, Recipe]:
    """The paper's rotations, at the group size where its permutation is not a no-op."""
    base = PAPER.replace(group_size=dim // 2)
    found: dict[str, Recipe] = {}
    for centre in (False, True):
        mark = ", mean removed" if centre else ""
        for composition in ("UHP", "UH", "H", "U"):
            changes = {"composition": composition, "center": centre}
            found[f"{composition}{mark}"] = base.replace(name=composition, **changes)
        plain = {"key_transform": "identity", "value_transform": "identity", "center": centre}
        found[f"none{mark}"] = base.replace(name="none", **plain)
        found[f"UHP, key target{mark}"] = base.replace(
            name="UHP-keys", key_target="keys", value_target="values", center=centre
        )
    return found


def _mild(power: float) -> Callable[[LayerStatistics, str, Recipe], Tensor]:
    def fit(statistics: LayerStatistics, side: str, recipe: Recipe) -> Tensor:
        c = unit_trace(centred_keys(statistics), recipe.ridge)
        m = unit_trace(statistics.read_queries.second_moment, recipe.ridge)
        root = spd_power(geometric_mean(torch.linalg.inv(c), m), power / 2)
        _, basis = torch.linalg.eigh(root @ c @ root)
        return root @ basis @ hadamard(c.shape[-1]).to(c.device)

    return fit


for _power in (0.5, 0.75, 1.25):
    transform(f"balanced-{_power}", needs=("moments", "pairs"))(_mild(_power))


def parts_of_uniform() -> dict[str, Recipe]:
    """One thing changed at a time; what refined keys cannot be combined with, without them."""
    plain = {"key_gain": 0.0, "value_gain": 0.0}
    even = UNIFORM.replace(refine_keys=False)
    return {
        "uniform": UNIFORM,
        "keys not refined": even,
        "keys not turned to queries (Hadamard)": even.replace(key_transform="hadamard"),
        "no transform at all": even.replace(key_transform="identity", value_transform="identity"),
        "positions not averaged": UNIFORM.replace(average_positions=False),
        "means kept in (Hadamard)": even.replace(
            key_transform="hadamard", center=False, key_gain=0.0, value_gain=0.0
        ),
        "without the gain": UNIFORM.replace(**plain),
        "gain 0.5 / 0.5": UNIFORM.replace(key_gain=0.5, value_gain=0.5),
        "gain 1 / 1": UNIFORM.replace(key_gain=1.0, value_gain=1.0),
        "min/max instead of least squares": even.replace(fit="minmax", **plain),
        "min/max clipped at .92": even.replace(
            fit="minmax", key_clip=0.92, value_clip=0.92, **plain
        ),
        "16-bit parameters": UNIFORM.replace(parameters="fp16"),
        "8-bit parameters": UNIFORM.replace(parameters="log8"),
        "compact (symmetric, 8 bits)": COMPACT,
        "metric rounding": even.replace(metric_rounding=True),
        "compact, metric rounding": COMPACT.replace(metric_rounding=True, refine_keys=False),
        "milder transform, power 0.5": even.replace(key_transform="balanced-0.5"),
        "milder transform, power 0.75": even.replace(key_transform="balanced-0.75"),
        "stronger transform, power 1.25": even.replace(key_transform="balanced-1.25"),
        "ridge 1e-3": UNIFORM.replace(ridge=1e-3),
        "ridge 1e-5": UNIFORM.replace(ridge=1e-5),
        "groups of half a head": even.replace(group_size=32),  # set to d / 2 below
    }


#: Budgets of bits by layer.
BUDGETS = (2.2, 2.3, 2.5)
#: Sink and recent, with the transforms of `uniform`.
WINDOWS = ((64, 64), (64, 128), (64, 512), (0, 256), (4, 256), (16, 256), (128, 256))
#: In FP8, as many tokens and as many bytes as 64 and 256 in BF16.
FP8_WINDOWS = ((64, 256), (128, 512))


def evenly(length: int, target: int) -> Tensor:
    return torch.linspace(0, target - length, 32).round().long()


def half_at_start(length: int, target: int) -> Tensor:
    offsets = evenly(length, target)
    return torch.cat([torch.zeros_like(offsets), offsets])


MIXTURES = {"evenly up to the target": evenly, "half at the start": half_at_start}


@dataclass(frozen=True)
class Calibration:
    """A text that a recipe is fitted to, and how much of it."""

    text: str
    tokens: int = 30000
    length: int | None = None
    general: bool = True

    def __str__(self) -> str:
        length = f" in sequences of {self.length}" if self.length else ""
        return f"{self.text}, {self.tokens} tokens{length}{'' if self.general else ', alone'}"


@dataclass(frozen=True)
class Plan:
    """How much is measured: LENGTH x windows for each section."""

    dtype: str = "float32"
    tokens: int = 30000
    length: int | None = None  # of calibration sequences
    methods: tuple[int, int] = (4096, 16)
    packed: tuple[str, ...] = PACKED
    simulated: tuple[str, ...] = tuple(simulations())
    alone: tuple[int, int] = (4096, 8)
    ablation: tuple[int, int] = (4096, 8)
    parts: tuple[int, int] = (4096, 8)
    robustness: tuple[int, int] = (4096, 8)
    split: tuple[int, int] = (4096, 2)
    heads: tuple[int, int] | None = None
    lengths: tuple[tuple[int, int], ...] = ((8192, 4), (16384, 4), (32768, 2))
    long_recipes: tuple[str, ...] = (
        "balanced",
        "compact",
        "uniform",
        "precise",
        "retrieval",
        "paper",
        "kivi-2bit",
    )
    calibrations: tuple[Calibration, ...] = (
        Calibration("wiki-calibration"),
        Calibration("prose"),
        Calibration("code"),
        Calibration("chat"),
        Calibration("wiki-calibration", 4096, 2048),
        Calibration("wiki-calibration", general=False),
        Calibration("prose", general=False),
        Calibration("code", general=False),
        Calibration("chat", general=False),
        Calibration("wiki-calibration", 4096, 2048, general=False),
    )
    sections: tuple[str, ...] = (
        "methods",
        "lengths",
        "ablation",
        "robustness",
        "shares",
        "split",
        "tuned",
        "parts",
        "alone",
        "windows",
        "positions",
    )


PLANS = {
    "gpu": Plan(),
    # SmolLM2 on two cores, in an hour or two: its context ends at 8,192.
    "cpu": Plan(
        methods=(4096, 2),
        alone=(4096, 2),
        ablation=(4096, 2),
        parts=(4096, 2),
        robustness=(4096, 2),
        split=(2048, 1),
        lengths=((8192, 2),),
    ),
    # SmolLM2 and the bundled books on two cores, in minutes; KVQuant's gradients alone would take
    # as long.
    "ci": Plan(
        tokens=3072,
        length=1024,
        methods=(1536, 1),
        alone=(1536, 1),
        ablation=(1536, 1),
        parts=(1536, 1),
        packed=("balanced", "compact", "paper", "quarot-int2", "saw-int4"),
        simulated=("kivi-2bit", "rotatekv-2bit", "turboquant-3bit"),
        sections=("methods",),
    ),
    "tiny": Plan(
        tokens=1500,
        length=500,
        methods=(640, 2),
        alone=(640, 1),
        ablation=(640, 1),
        parts=(640, 1),
        robustness=(640, 1),
        split=(640, 1),
        heads=(640, 1),
        lengths=((768, 1),),
        calibrations=(
            Calibration("wiki-calibration", 1500, 500),
            Calibration("code", 1500, 500, general=False),
        ),
    ),
}
