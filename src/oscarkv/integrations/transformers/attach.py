"""Prepare a model for an artifact: check that they fit, route its attention, fold values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oscarkv.artifact import Artifact, load_artifact
from oscarkv.errors import UnsupportedModelError
from oscarkv.integrations.folding import folded_output, folded_values
from oscarkv.integrations.transformers.attention import route
from oscarkv.integrations.transformers.geometry import (
    attention_modules,
    describe,
    require_one_device,
)

_STATE = "_oscarkv_attachment"
#: Set on the attention modules whose values are folded.
FOLDED = "_oscarkv_folded"


class Attachment:
    """What `attach` did to a model, and how to undo it."""

    def __init__(self, model: Any, artifact: Artifact, previous: str) -> None:
        self.model, self.artifact, self.previous = model, artifact, previous
        self._originals: dict[nn.Linear, tuple[Tensor, nn.Parameter | None]] = {}

    @property
    def folded(self) -> bool:
        return bool(self._originals)

    def fold_values(self) -> None:
        """Fold (v - m) B into W_V, and B^-1 and m W_O into W_O: values leave the model transformed,
        and the cache need not transform them. Changes rounding; `detach` undoes it exactly."""
        modules = attention_modules(self.model)
        pairs = {}
        for index in self.artifact.layers:
            pairs[index] = (
                _plain_linear(modules[index], "v_proj", index),
                _plain_linear(modules[index], "o_proj", index),
            )
        for index, (v_proj, o_proj) in pairs.items():
            self._fold(v_proj, o_proj, index)
            setattr(modules[index], FOLDED, True)

    def _fold(self, v_proj: nn.Linear, o_proj: nn.Linear, index: int) -> None:
        layer, device = self.artifact.layers[index], v_proj.weight.device
        value, inverse, mean = (
            tensor.to(device) for tensor in (layer.value, layer.value_inverse, layer.value_mean)
        )
        for linear in (v_proj, o_proj):
            self._originals[linear] = (linear.weight.data, linear.bias)
        _set(v_proj, *folded_values(v_proj.weight.data, v_proj.bias, value, mean))
        weight, offset = folded_output(o_proj.weight.data, inverse, mean)
        if o_proj.bias is not None:
            offset = offset + o_proj.bias.data.double()
        _set(o_proj, weight, offset)

    def detach(self) -> None:
        """Put the model back as it was."""
        for linear, (weight, bias) in self._originals.items():
            linear.weight.data = weight
            linear.register_parameter("bias", bias)
        self._originals.clear()
        for module in attention_modules(self.model).values():
            if hasattr(module, FOLDED):
                delattr(module, FOLDED)
        self.model.set_attn_implementation(self.previous)
        if hasattr(self.model, _STATE):
            delattr(self.model, _STATE)


def attach(model: Any, artifact: Artifact | str | Path, fold_values: bool = False) -> Attachment:
    """Check an artifact against a model and route the model's attention through oscarkv.

        attachment = oscarkv.attach(model, "model.safetensors", fold_values=True)
        ...
        attachment.detach()

    Attaching again with the same artifact changes nothing. `OscarCache` attaches by itself.
    """
    require_one_device(model)  # every time: it may have been moved
    if not isinstance(artifact, Artifact):
        artifact = load_artifact(artifact)
    present: Attachment | None = getattr(model, _STATE, None)
    if present is not None and present.artifact is artifact:
        if fold_values and not present.folded:
            present.fold_values()
        return present
    artifact.model.require_match(describe(model).identity)
    if present is not None and present.folded:
        if not _same_values(present.artifact, artifact):
            raise UnsupportedModelError(
                "this model has another artifact's values folded into its weights; call detach() "
                "on that attachment first"
            )
        return present
    previous = present.previous if present else model.config._attn_implementation
    attachment = Attachment(model, artifact, previous)
    if fold_values:
        attachment.fold_values()
    route(model)
    setattr(model, _STATE, attachment)
    return attachment


def values_are_folded(model: Any) -> bool:
    present: Attachment | None = getattr(model, _STATE, None)
    return present is not None and present.folded


def _same_values(one: Artifact, other: Artifact) -> bool:
    """Whether two artifacts fold the same into the weights, such as one file read twice."""
    if one.layers.keys() != other.layers.keys():
        return False
    return all(
        torch.equal(layer.value, other.layers[index].value)
        and torch.equal(layer.value_mean, other.layers[index].value_mean)
        for index, layer in one.layers.items()
    )


def _plain_linear(module: nn.Module, name: str, index: int) -> nn.Linear:
    linear = getattr(module, name, None)
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        found = "missing" if linear is None else type(linear).__name__
        raise UnsupportedModelError(
            f"layer {index}: cannot fold values into {name} ({found}); folding needs separate, "
            "unquantised v_proj and o_proj without adapters. Use fold_values=False"
        )
    return linear


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    dtype = linear.weight.dtype
    linear.weight.data = weight.to(dtype)
    linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
