"""What calibration produces, and what it must satisfy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oscarkv.codec.encode import REFINED_SCALE
from oscarkv.errors import ArtifactError, ModelMismatchError
from oscarkv.recipe import CODE_BITS, NOMINAL_LENGTH, Recipe

#: What is written: artifacts whose layers differ in bits are format 2, those with refined keys
#: format 3, with split scales 4, with refined keys of 3 bits 5. Older readers refuse them rather
#: than misread them.
FORMAT_VERSION, MIXED_FORMAT_VERSION, REFINED_FORMAT_VERSION, SPLIT_FORMAT_VERSION = 1, 2, 3, 4
WIDE_FORMAT_VERSION = 5
#: Largest entry of A^-1 A - I that a file may have; fp32 inverses of sane transforms have 1e-5.
INVERSE_TOLERANCE = 1e-3
#: Exponents e0 with which every 8-bit scale 2^(e0 + n/16), n < 256, is a normal fp32 number.
EXPONENTS = range(-126, 112)


@dataclass(frozen=True)
class ModelIdentity:
    """Which model an artifact belongs to. Geometry must agree, and so must the weights."""

    name: str
    architecture: str
    layers: int  # of the model, quantised or not
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope: str  # JSON of the RoPE parameters
    fingerprint: str  # a sample of the weights, bfloat16 in hex; empty: unknown

    def require_match(self, model: ModelIdentity) -> None:
        """Refuse to be used with another model, naming the first thing that differs."""
        for what in ("architecture", "layers", "query_heads", "kv_heads", "head_dim", "rope"):
            mine, theirs = getattr(self, what), getattr(model, what)
            if mine != theirs and mine != "":
                raise ModelMismatchError(
                    f"this artifact was calibrated for {self.name} ({what} {mine}), but the model "
                    f"{model.name} has {what} {theirs}; calibrate that model: oscarkv calibrate"
                )
        if not same_weights(self.fingerprint, model.fingerprint):
            raise ModelMismatchError(
                f"this artifact was calibrated for the weights of {self.name}, and {model.name} "
                "has others (fine-tuned, or another model of the same shape); calibrate these: "
                "oscarkv calibrate"
            )


def same_weights(mine: str, theirs: str) -> bool:
    """Whether two fingerprints agree, up to the rounding of the precision a model was loaded in."""
    if not mine or not theirs:
        return True
    try:
        a, b = (
            torch.frombuffer(bytearray.fromhex(x), dtype=torch.bfloat16).float()
            for x in (mine, theirs)
        )
    except ValueError:  # not a fingerprint at all
        return False
    if a.shape != b.shape:
        return False
    return bool(((a - b).abs() <= 2.0**-7 * torch.maximum(a.abs(), b.abs())).all())


def reader_of(key: Tensor, recipe: Recipe) -> Tensor:
    """What queries are multiplied with to read keys stored by A [..., d, d]: A^-T.

    With refined keys, codes are first digits of the first quarter of the channels, the middle half,
    and second digits of the first quarter; the last quarter of A's columns is not stored. With
    split scales the second quarter is not, and second digits lie in its place.
    """
    inverse = torch.linalg.inv(key).mT
    if not recipe.refined:
        return inverse
    quarter, levels = key.shape[-1] // 4, 1 << recipe.key_bits
    if recipe.split:
        first = inverse[..., :quarter]
        return torch.cat([first, first / levels, inverse[..., 2 * quarter :]], -1)
    first = inverse[..., :quarter] / REFINED_SCALE[recipe.key_bits]
    return torch.cat([first, inverse[..., quarter : 3 * quarter], first / levels], -1)


def _from_identity(matrix: Tensor) -> float:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return float((matrix - eye).abs().max())


@dataclass
class LayerTransforms:
    """One layer, fp32, per KV head. Row vectors: stored k' = (k - m) A, read with q' = q A^-T."""

    key: Tensor  # A [H, d, d]
    query: Tensor  # A^-T [H, d, d], or what reads two digits of a channel: `reader_of`
    key_mean: Tensor  # [H, d]
    value: Tensor  # B [H, d, d]
    value_inverse: Tensor  # B^-1 [H, d, d]
    value_mean: Tensor  # [H, d]
    exponents: Tensor  # int32 [2, H]: e0 of the 8-bit scales of keys and values
    spectrum: Tensor  # [H, d]: energy of the stored keys along their principal axes, descending
    errors: Tensor  # [2, H]: relative error of logits and of values on held-back text; NaN unknown
    fallback: Tensor  # int32 [H]: 1 where the self-check replaced the key transform by Hadamard
    metric: Tensor | None = None  # A^-1 M_Q A^-T [H, d, d], with metric rounding only

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def inverse_errors(self, recipe: Recipe) -> dict[str, float]:
        """Largest entry of A^-1 A - I over heads, of keys (where they are stored) and of values."""
        key, query = self.key.double(), self.query.double()
        errors = {"value": _from_identity(self.value_inverse.double() @ self.value.double())}
        if not recipe.refined:
            return errors | {"key": _from_identity(query.mT @ key)}
        quarter = key.shape[-1] // 4
        if recipe.split:
            first, second, once = query.split([quarter, quarter, 2 * quarter], -1)
            stored, scale = torch.cat([key[..., :quarter], key[..., 2 * quarter :]], -1), 1.0
        else:
            first, once, second = query.split([quarter, 2 * quarter, quarter], -1)
            stored, scale = key[..., : 3 * quarter], REFINED_SCALE[recipe.key_bits]
        readers = (
            torch.cat([x * scale, once], -1) for x in (first, second * (1 << recipe.key_bits))
        )
        return errors | {"key": max(_from_identity(reader.mT @ stored) for reader in readers)}

    @property
    def condition(self) -> Tensor:
        """cond(A) per head."""
        return torch.linalg.cond(self.key.double())


@dataclass
class Artifact:
    """Transforms for the quantised layers of one model under one recipe."""

    model: ModelIdentity
    recipe: Recipe
    layers: dict[int, LayerTransforms]
    calibration: dict[str, Any] = field(default_factory=dict)  # corpus, tokens, lengths, seed
    library_version: str = ""
    #: Key and value bits of layers that have others than the recipe's.
    layer_bits: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.validate()

    @property
    def mixed(self) -> bool:
        """Whether some layers have other bits than the recipe says."""
        return bool(self.layer_bits)

    def layer_recipe(self, layer: int) -> Recipe:
        """The recipe with the bits of one layer."""
        if layer not in self.layer_bits:
            return self.recipe
        keys, values = self.layer_bits[layer]
        return self.recipe.replace(key_bits=keys, value_bits=values)

    def with_bits(self, layer_bits: Mapping[int, tuple[int, int]]) -> Artifact:
        """The same transforms with other bits in some layers, those of the recipe in all others.

        What is stored does not depend on the bits of a code, only what reads two digits does.
        Errors on held-back text are then unknown.
        """
        base = (self.recipe.key_bits, self.recipe.value_bits)
        layers, changed = dict(self.layers), {}
        for index, layer in self.layers.items():
            before, bits = self.layer_recipe(index), layer_bits.get(index, base)
            after = self.recipe.replace(key_bits=bits[0], value_bits=bits[1])
            if bits != base:
                changed[index] = bits
            errors = layer.errors.clone()
            if before.value_bits != after.value_bits:
                errors[1] = math.nan
            query = layer.query
            if before.key_bits != after.key_bits:
                errors[0] = math.nan
                if before.refined != after.refined:
                    raise ArtifactError(
                        f"layer {index}: keys were fitted for {before.key_bits} bits, "
                        f"and those of {after.key_bits} need another transform"
                    )
                query = reader_of(layer.key.double(), after).float().contiguous()
            layers[index] = replace(layer, query=query, errors=errors)
        return replace(self, layers=layers, layer_bits=changed)

    @property
    def refines_wide_keys(self) -> bool:
        """Whether some layer has refined keys of more than 2 bits."""
        recipes = (self.layer_recipe(index) for index in self.layers)
        return any(recipe.refined and recipe.key_bits > 2 for recipe in recipes)

    @property
    def history_bits(self) -> float:
        """Bits an element of the packed history, on average over the packed layers."""
        dim = self.model.head_dim
        return sum(self.layer_recipe(i).history_bits(dim) for i in self.layers) / len(self.layers)

    def bits(self, length: int = NOMINAL_LENGTH) -> float:
        """Bits an element at a context length, on average over the packed layers, as
        `Recipe.bits`. Of other layers an artifact does not know what they hold: all tokens in full
        precision, a sliding window, or no keys and values at all."""
        dim = self.model.head_dim
        return sum(self.layer_recipe(i).bits(dim, length) for i in self.layers) / len(self.layers)

    def validate(self) -> None:
        """Check shapes, types, finite values and inverses; the message names the layer."""
        heads, dim = self.model.kv_heads, self.model.head_dim
        shapes = {
            "key": (heads, dim, dim),
            "query": (heads, dim, dim),
            "key_mean": (heads, dim),
            "value": (heads, dim, dim),
            "value_inverse": (heads, dim, dim),
            "value_mean": (heads, dim),
            "exponents": (2, heads),
            "spectrum": (heads, dim),
            "errors": (2, heads),
            "fallback": (heads,),
            "metric": (heads, dim, dim),
        }
        integers = ("exponents", "fallback")
        if not self.layers:
            raise ArtifactError("no layer has transforms")
        for index, bits in self.layer_bits.items():
            if index not in self.layers:
                raise ArtifactError(f"bits of layer {index}, which has no transforms")
            if self.recipe.exact or not set(bits) <= set(CODE_BITS):
                raise ArtifactError(f"layer {index}: {bits} bits; use 2, 3 or 4 for either side")
        for index, layer in self.layers.items():
            if not 0 <= index < self.model.layers:
                raise ArtifactError(f"layer {index} of a model with {self.model.layers} layers")
            for name, tensor in layer.tensors().items():
                where = f"layer {index}: {name}"
                if tuple(tensor.shape) != shapes[name]:
                    raise ArtifactError(
                        f"{where} has shape {list(tensor.shape)}, expected {list(shapes[name])}"
                    )
                expected = torch.int32 if name in integers else torch.float32
                if tensor.dtype != expected:
                    raise ArtifactError(f"{where} is {tensor.dtype}, expected {expected}")
                if name not in ("errors", *integers) and not bool(torch.isfinite(tensor).all()):
                    raise ArtifactError(f"{where} has NaN or infinite entries")
            low, high = (int(x) for x in layer.exponents.aminmax())
            if low not in EXPONENTS or high not in EXPONENTS:
                raise ArtifactError(f"layer {index}: exponents {low} to {high} are out of range")
            if self.recipe.metric_rounding and layer.metric is None:
                raise ArtifactError(f"layer {index}: the recipe rounds by a metric, but has none")
            for side, error in layer.inverse_errors(self.layer_recipe(index)).items():
                if not error <= INVERSE_TOLERANCE:
                    raise ArtifactError(
                        f"layer {index}: {side} transform and its inverse differ from identity by "
                        f"{error:.2g}"
                    )
