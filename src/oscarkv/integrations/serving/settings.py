"""What a user asks an engine for, however the engine hands it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Self

import torch

from oscarkv.artifact import Artifact, load_artifact
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.recipe import Recipe

#: Known by name only: asking whether one can run here would start CUDA in an engine's first
#: process.
BACKENDS = ("cuda", "triton", "torch")


@dataclass(frozen=True)
class Settings:
    """One option each."""

    artifact: str
    sink: int | None = None  # instead of the recipe's
    recent: int | None = None
    skip: Sequence[int] = ()  # layers that keep the engine's own cache
    strict: bool = False
    uniform: bool = False  # the recipe's bits in all layers, whatever the artifact gives some
    backend: str = "auto"
    enabled: bool = True

    @property
    def loaded(self) -> Artifact:
        return _load(self.artifact, self.uniform)

    @property
    def recipe(self) -> Recipe:
        """That of the artifact, with this server's windows."""
        return self._windowed(self.loaded.recipe)

    def layer_recipe(self, layer: int) -> Recipe:
        """The same with the bits of one layer."""
        return self._windowed(self.loaded.layer_recipe(layer))

    @property
    def others(self) -> tuple[Recipe, ...]:
        """The recipes of layers with more bits."""
        return tuple(self.layer_recipe(layer) for layer in sorted(self.loaded.layer_bits))

    def _windowed(self, recipe: Recipe) -> Recipe:
        windows = {"sink": self.sink, "recent": self.recent}
        changed = {name: value for name, value in windows.items() if value is not None}
        return recipe.replace(**changed)

    @classmethod
    def of(cls, section: dict[str, Any], needs_artifact: str) -> Self | None:
        """What a user wrote, checked; None if it is switched off. `needs_artifact` is what to say
        where there is no artifact."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(section) - set(known))
        if unknown:
            names = f"{', '.join(unknown)}; known: {', '.join(known)}"
            raise OscarError(f"unknown oscarkv option {names}")
        if not section.get("enabled", True):
            return None
        if "artifact" not in section:
            raise OscarError(needs_artifact)
        for name, value in section.items():
            wanted, fits = _OPTIONS.get(name, ("", None))
            if fits is not None and not fits(value):
                raise OscarError(f"oscarkv option {name} is {value!r}; it wants {wanted}")
        return cls(**section)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_layers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(x) is int and x >= 0 for x in value)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


#: What each option may be: in words, and whether a value is.
_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "artifact": ("the path of a file", lambda x: isinstance(x, str)),
    "sink": ("a number of tokens", _is_count),
    "recent": ("a number of tokens", _is_count),
    "skip": ("a list of layers, counted from 0", _is_layers),
    "strict": ("true or false", _is_switch),
    "backend": (f"one of auto, {', '.join(BACKENDS)}", lambda x: x in ("auto", *BACKENDS)),
    "uniform": ("true or false", _is_switch),
    "enabled": ("true or false", _is_switch),
    "fold_values": ("true or false", _is_switch),
    "canary": ("a section, such as {}", lambda x: x is None or isinstance(x, dict)),
}


@lru_cache(maxsize=4)
def _load(path: str, uniform: bool) -> Artifact:
    artifact = load_artifact(path)
    return artifact.with_bits({}) if uniform else artifact


def window_page_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one window page for one KV head: keys and values of 16 tokens."""
    return 2 * PAGE_QUANTUM * head_dim * dtype.itemsize
