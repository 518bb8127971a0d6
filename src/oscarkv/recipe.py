"""Every knob and every default of a KV-cache recipe, in one frozen dataclass.

A recipe says how keys and values are transformed, encoded and windowed. It is pure data: it
imports nothing of oscarkv but its errors, and everything else in the package reads it. Named
presets live with their method, one small file each, in `oscarkv.methods`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from oscarkv.errors import RecipeError

EXACT_BITS = 16
#: The context at which bits are quoted and budgets hold.
NOMINAL_LENGTH = 131072
CODE_BITS = (2, 3, 4)
#: Keys of these bits can be refined; with 4, a quarter of the channels is better kept than refined.
REFINED_BITS = (2, 3)
PARAMETER_FORMATS = ("auto", "fp16", "log8", "log8-symmetric")
#: The bits of the parameters of one group, for each format.
PARAMETER_BITS = {"fp16": 32, "log8": 16, "log8-symmetric": 8}
GAINS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Factors of a rotation: U eigenbasis, H Hadamard, P bit-reversal permutation.
COMPOSITIONS = ("UHP", "UPH", "UH", "UP", "U", "HP", "H")
KEY_TARGETS = ("queries", "keys")
VALUE_TARGETS = ("diag-scores", "softmax", "values")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to keep a KV cache small. The defaults are the `uniform` preset."""

    name: str = "uniform"

    # Storage.
    key_bits: int = 2
    value_bits: int = 2
    group_size: int | None = None  # channels that share parameters; None: the whole head
    parameters: str = "auto"  # fp16 from head_dim 128 on, log8 below: at most 2.3 bits at 128K
    #: Bits an element at 128K that layers may take on average: calibration gives those that lose
    #: most a third bit. None: all layers have the bits above.
    budget: float | None = None

    # Tokens kept exact: the first `sink` and the last `recent`, the query's own included.
    sink: int = 64
    recent: int = 256

    # Transforms. Names are those of `oscarkv.methods`.
    key_transform: str = "balanced"
    value_transform: str = "hadamard"
    composition: str = "UHP"  # factors of the `rotation` transform
    key_target: str = "queries"  # whose second moment gives U for keys
    value_target: str = "diag-scores"  # and for values
    per_head: bool = True  # False: one transform a layer, averaged over its KV heads
    center: bool = True  # subtract the mean key and value; put back exactly at read-out
    average_positions: bool = True  # average the statistics over RoPE offsets
    ridge: float = 1e-4  # added to the unit-trace moments of the balanced transform
    refine_keys: bool = (
        True  # keys: a quarter of the channels with twice the bits, a quarter with 0
    )
    split_scales: bool = False  # refined keys: a scale for either kind; values: one for each half

    # Encoding.
    fit: str = "least-squares"  # or "minmax"
    key_clip: float = 0.0  # minmax only: quantile of |x| at which a row is clipped; 0: off
    value_clip: float = 0.0
    key_gain: float = 0.75  # power of the unbiasing gain folded into the scale
    value_gain: float = 1.0
    metric_rounding: bool = False  # coordinate descent on key codes under the query metric

    def __post_init__(self) -> None:
        self._check_storage()
        self._check_encoding()
        self._check_transforms()

    # -- facts derived from the knobs ------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether nothing is quantised (the `bf16` preset)."""
        return self.key_bits == EXACT_BITS

    @property
    def refined(self) -> bool:
        """Whether key codes are two digits of some channels and none of others."""
        return self.refine_keys and self.key_bits in REFINED_BITS

    @property
    def split(self) -> bool:
        """Whether refined keys have one scale for channels of two digits and one for the others."""
        return self.refined and self.split_scales

    @property
    def unrefined(self) -> Recipe:
        """The same with the same bits for all channels of keys."""
        return self.replace(refine_keys=False, split_scales=False)

    @property
    def uniform(self) -> Recipe:
        """The same with the same bits in all layers."""
        return self.replace(budget=None)

    def parameter_format(self, head_dim: int) -> str:
        if self.parameters != "auto":
            return self.parameters
        return "fp16" if head_dim >= 128 else "log8"

    def groups(self, head_dim: int) -> int:
        """How many groups a head has; refuses sizes that do not divide it."""
        if self.group_size is None:
            return 2 if self.split_scales else 1
        if head_dim % self.group_size:
            raise RecipeError(
                f"recipe {self.name!r}: group_size {self.group_size} does not divide "
                f"head_dim {head_dim}; use a divisor or None for the whole head"
            )
        return head_dim // self.group_size

    def history_bits(self, head_dim: int) -> float:
        """Bits per element of the packed history, parameters included."""
        if self.exact:
            return float(EXACT_BITS)
        per_group = PARAMETER_BITS[self.parameter_format(head_dim)]
        codes = (self.key_bits + self.value_bits) / 2
        return codes + per_group * self.groups(head_dim) / head_dim

    def bits(self, head_dim: int, length: int = NOMINAL_LENGTH) -> float:
        """Bits per element at a context length: history plus exact windows (the paper's count).
        Without what a budget adds: an artifact knows that."""
        exact = min(self.sink + self.recent, length) / length
        return self.history_bits(head_dim) * (1 - exact) + EXACT_BITS * exact

    # -- construction ------------------------------------------------------------------------

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Recipe:
        """A preset, optionally with knobs changed: `Recipe.named("paper", sink=128)`."""
        from oscarkv.methods import ALONE, presets, simulations  # which import this module

        known = presets()
        if name.removesuffix(ALONE) in simulations():
            raise RecipeError(
                f"{name!r} is simulated: its codes do not fit the packed format, so it can be "
                "measured (oscarkv eval fidelity --recipes) but not calibrated, served or saved"
            )
        if name not in known:
            raise RecipeError(f"unknown recipe {name!r}; known: {', '.join(sorted(known))}")
        return known[name].replace(**overrides)

    def replace(self, **overrides: Any) -> Recipe:
        unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            knobs = ", ".join(field.name for field in dataclasses.fields(self))
            raise RecipeError(f"unknown recipe knob {', '.join(unknown)}; knobs: {knobs}")
        if not overrides:
            return self
        return dataclasses.replace(self, **overrides)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        try:
            knobs = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecipeError(f"recipe is not valid JSON: {error}") from None
        if not isinstance(knobs, dict):
            raise RecipeError("recipe JSON must be an object of knobs")
        return cls().replace(**knobs)

    # -- checks ------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        raise RecipeError(f"recipe {self.name!r}: {reason}")

    def _check_choice(self, knob: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, knob)
        if value not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            self._refuse(f"{knob} is {value!r}; choose one of {listed}")

    def _check_storage(self) -> None:
        for knob in ("key_bits", "value_bits"):
            self._check_choice(knob, (*CODE_BITS, EXACT_BITS))
        if (self.key_bits == EXACT_BITS) != (self.value_bits == EXACT_BITS):
            self._refuse("key_bits and value_bits must both be 16, or neither")
        self._check_choice("parameters", PARAMETER_FORMATS)
        if self.group_size is not None and (self.group_size < 16 or self.group_size % 16):
            self._refuse(f"group_size is {self.group_size}; use a multiple of 16, or None")
        for knob in ("sink", "recent"):
            value = getattr(self, knob)
            if not isinstance(value, int) or value < 0:
                self._refuse(f"{knob} is {value!r}; use a whole number of tokens, 0 or more")
        if self.budget is not None and (self.exact or self.fit != "least-squares"):
            self._refuse("a budget is for codes by least squares; set budget=None")
        if self.recent < 1:
            self._refuse("recent is 0; the newest token is always exact, use 1 or more")

    def _check_encoding(self) -> None:
        self._check_choice("fit", ("least-squares", "minmax"))
        for knob in ("key_gain", "value_gain"):
            self._check_choice(knob, GAINS)
        for knob in ("key_clip", "value_clip"):
            clip = getattr(self, knob)
            if not 0.0 <= clip <= 1.0:
                self._refuse(f"{knob} is {clip}; use a quantile from 0 (off) to 1")
            if clip and self.fit != "minmax":
                self._refuse(f"{knob} needs fit='minmax': least squares chooses its own range")
        if self.fit == "minmax":
            if self.key_gain or self.value_gain:
                self._refuse("key_gain and value_gain need fit='least-squares'; set them to 0")
            if self.parameters == "log8-symmetric":
                self._refuse("symmetric parameters need fit='least-squares'")
            if self.metric_rounding:
                self._refuse("metric_rounding needs fit='least-squares'")

    def _check_transforms(self) -> None:
        self._check_choice("composition", COMPOSITIONS)
        self._check_choice("key_target", KEY_TARGETS)
        self._check_choice("value_target", VALUE_TARGETS)
        if not 0 < self.ridge < 1:
            self._refuse(f"ridge is {self.ridge}; use a small positive number such as 1e-4")
        if self.key_transform == "balanced" and not self.center:
            self._refuse("the balanced transform is fitted about the mean; set center=True")
        if self.split_scales and not (self.refine_keys and self.parameters == "log8-symmetric"):
            self._refuse("split_scales needs refine_keys and parameters='log8-symmetric'")
        if self.refined:
            conflicts = {
                "key_transform": self.key_transform != "balanced",
                "fit": self.fit != "least-squares",
                "group_size": self.group_size is not None,
                "metric_rounding": self.metric_rounding,
            }
            for knob, conflict in conflicts.items():
                if conflict:
                    value = getattr(self, knob)
                    self._refuse(f"{knob} is {value!r}, which needs refine_keys=False")
