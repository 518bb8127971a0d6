"""Keys and values as a reader of the packed history sees them, without packing them."""

from __future__ import annotations

from torch import Tensor

from oscarkv.artifact.artifact import LayerTransforms
from oscarkv.codec import RowCodec
from oscarkv.codec.parameters import bases
from oscarkv.recipe import Recipe


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
