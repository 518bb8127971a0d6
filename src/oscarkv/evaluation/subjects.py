"""What can be measured: a packed artifact, or a method that is simulated on dense tensors.

A subject makes a fresh cache for every window and knows its bits; everything else is the same for
all. Any part of a subject can be measured by itself: some layers, some heads, keys or values only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from oscarkv.artifact import Artifact
from oscarkv.artifact.round_trip import AsRead
from oscarkv.calibration.budget import SIDES
from oscarkv.errors import OscarError
from oscarkv.integrations.transformers.cache import OscarCache
from oscarkv.integrations.transformers.simulate import SimulatedCache, Windows
from oscarkv.methods.simulation import Part, Quantizer, Simulation


class Subject(Protocol):
    def make_cache(self, model: Any) -> Any: ...

    def bits(self, length: int) -> float:
        """Bits an element at a context length, by the formula."""

    def bits_held(self, cache: Any, length: int) -> float:
        """Bits an element that a cache holds after a window of this length."""

    @property
    def digest(self) -> str:
        """The same for two subjects that give the same figures."""


@dataclass(frozen=True)
class Packed:
    """An artifact, in the cache that serves it."""

    artifact: Artifact
    strict: bool = True
    backend: str = "auto"

    def make_cache(self, model: Any) -> OscarCache:
        return OscarCache(model, self.artifact, strict=self.strict, backend=self.backend)

    def bits(self, length: int) -> float:
        return self.artifact.bits(length)

    def bits_held(self, cache: OscarCache, length: int) -> float:
        return cache.bits_per_element(window_bytes=2)

    @cached_property
    def digest(self) -> str:
        parts = [self.artifact.recipe.to_json(), str(self.strict), str(self.artifact.layer_bits)]
        tensors = [
            tensor
            for _, layer in sorted(self.artifact.layers.items())
            for tensor in (layer.key, layer.key_mean, layer.value, layer.value_mean)
        ]
        return _digest(parts, tensors)


@dataclass(frozen=True)
class Simulated:
    """Quantizers of some layers on dense tensors."""

    name: str
    quantizers: Mapping[int, Quantizer]
    windows: Windows
    history_bits: float
    identity: str = ""  # what the quantizers were fitted to

    def make_cache(self, model: Any) -> SimulatedCache:
        return SimulatedCache(model, self.quantizers, self.windows)

    def bits(self, length: int) -> float:
        windows = self.windows
        exact = windows.sink + windows.recent + (windows.token_group - 1) / 2
        share = min(exact, length) / length
        return self.history_bits * (1 - share) + windows.bits * share

    def bits_held(self, cache: Any, length: int) -> float:
        return self.bits(length)  # nothing is packed: the formula at this length

    @property
    def digest(self) -> str:
        return _digest([self.name, self.identity, str(self.windows)], [])

    def part(
        self,
        *,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
        sides: Collection[str] = SIDES,
    ) -> Simulated:
        """The same with only some layers, KV heads and sides rounded; the rest is exact."""
        chosen = {
            layer: Part(quantizer, None if heads is None else tuple(heads), tuple(sides))
            for layer, quantizer in self.quantizers.items()
            if layers is None or layer in layers
        }
        what = f"layers {layers}, heads {heads}, {'+'.join(sides)}"
        return replace(self, quantizers=chosen, identity=f"{self.identity} {what}")


def simulate_artifact(artifact: Artifact, device: torch.device) -> Simulated:
    """An artifact's rounding on dense tensors: the same codes, so the same figures, and its parts
    can be measured one by one."""
    if artifact.recipe.exact:
        raise OscarError(f"recipe {artifact.recipe.name!r} rounds nothing; there is no part of it")
    quantizers = {
        index: AsRead.of(layer, artifact.layer_recipe(index), device)
        for index, layer in artifact.layers.items()
    }
    recipe = artifact.recipe
    return Simulated(
        recipe.name,
        quantizers,
        Windows(recipe.sink, recipe.recent),
        artifact.history_bits,
        Packed(artifact).digest,
    )


def simulate_method(
    method: Simulation, quantizers: Mapping[int, Quantizer], heads: int, dim: int, fitted_to: str
) -> Simulated:
    windows = Windows(method.sink, method.recent, method.token_group)
    return Simulated(
        method.name,
        quantizers,
        windows,
        method.history_bits(heads, dim),
        f"{method!r} {fitted_to if method.needs else ''}",
    )


def _digest(parts: list[str], tensors: list[Tensor]) -> str:
    digest = hashlib.sha256("\n".join(parts).encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
