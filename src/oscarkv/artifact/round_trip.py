"""Keys and values as a reader of the packed history sees them, without packing them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.artifact.artifact import LayerTransforms
from oscarkv.codec import RowCodec
from oscarkv.codec.parameters import bases
from oscarkv.recipe import Recipe


@dataclass(frozen=True)
class AsRead:
    """One layer's rounding, as a function of its keys and of its values."""

    layer: LayerTransforms
    recipe: Recipe

    @classmethod
    def of(cls, layer: LayerTransforms, recipe: Recipe, device: torch.device) -> AsRead:
        there = {name: tensor.to(device) for name, tensor in layer.tensors().items()}
        return cls(LayerTransforms(**there), recipe)

    def keys(self, keys: Tensor) -> Tensor:
        return keys_as_read(keys, self.layer, self.recipe)

    def values(self, values: Tensor) -> Tensor:
        return values_as_read(values, self.layer, self.recipe)


def keys_as_read(keys: Tensor, layer: LayerTransforms, recipe: Recipe) -> Tensor:
    """fp32 keys [H, T, d] -> encoded, decoded, and back in the model's own basis."""
    codec, base = RowCodec.for_keys(recipe, keys.shape[-1]), bases(layer.exponents[0])[:, None]
    mean = layer.key_mean[:, None]
    rows = (keys - mean) @ layer.key
    decoded = codec.decode(*codec.encode(rows, base, layer.metric), base)
    return decoded @ layer.query.mT + mean


def values_as_read(values: Tensor, layer: LayerTransforms, recipe: Recipe) -> Tensor:
    """fp32 values [H, T, d] -> encoded, decoded, and back in the model's own basis."""
    codec, base = RowCodec.for_values(recipe, values.shape[-1]), bases(layer.exponents[1])[:, None]
    mean = layer.value_mean[:, None]
    rows = (values - mean) @ layer.value
    return codec.decode(*codec.encode(rows, base), base) @ layer.value_inverse + mean
