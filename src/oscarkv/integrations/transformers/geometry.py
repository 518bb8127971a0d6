"""What a Transformers model looks like: its identity, its layers, its RoPE."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs

from oscarkv.artifact import ModelIdentity
from oscarkv.errors import UnsupportedModelError
from oscarkv.integrations.transformers.attention import attention_implementation, observing

FULL, SLIDING = "full_attention", "sliding_attention"
#: Layers whose cache is a state of the whole sequence.
STATES = ("conv", "linear_attention", "mamba")


@dataclass(frozen=True)
class ModelGeometry:
    identity: ModelIdentity
    layer_types: tuple[str, ...]  # of the cache layers, in order

    def select(
        self, *, quantize_sliding: bool, skip_layers: tuple[int, ...], skip_unsupported: bool
    ) -> list[int]:
        """The layers to quantise; refuses those it cannot, unless told to skip them."""
        outside = [i for i in skip_layers if not 0 <= i < len(self.layer_types)]
        if outside:
            raise UnsupportedModelError(
                f"cannot skip layer {outside[0]}: {self.identity.name} has layers 0 to "
                f"{len(self.layer_types) - 1}"
            )
        chosen: list[int] = []
        refused: list[int] = []
        for index, kind in enumerate(self.layer_types):
            if index in skip_layers or (kind == SLIDING and not quantize_sliding):
                continue
            (chosen if kind in (FULL, SLIDING) else refused).append(index)
        if refused and not skip_unsupported:
            kinds = ", ".join(sorted({self.layer_types[i] for i in refused}))
            listed = ", ".join(map(str, refused))
            raise UnsupportedModelError(
                f"{self.identity.name}: layers {listed} use {kinds}, which has no per-head keys "
                "and values to quantise; leave them in full precision with --skip-unsupported"
            )
        if not chosen:
            hint = "; quantise sliding windows with --quantize-sliding"
            raise UnsupportedModelError(
                f"{self.identity.name}: no layer is left to quantise (layer types: "
                f"{', '.join(sorted(set(self.layer_types)))})"
                + (hint if SLIDING in self.layer_types and not quantize_sliding else "")
            )
        return chosen


def describe(model: Any) -> ModelGeometry:
    """Read a model's geometry from its configuration and weights."""
    name = getattr(model, "oscarkv_name", "") or model.config.name_or_path or type(model).__name__
    geometry = describe_config(model.config, str(name), type(model).__name__)
    identity = dataclasses.replace(geometry.identity, fingerprint=fingerprint(model))
    return dataclasses.replace(geometry, identity=identity)


def describe_config(whole: Any, name: str, architecture: str) -> ModelGeometry:
    """What a configuration alone tells: everything but the fingerprint of the weights."""
    config = whole.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (MLA): its cache is one latent per token, "
            "not keys and values per head. oscarkv does not quantise it yet"
        )
    for needed in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not hasattr(config, needed):
            raise UnsupportedModelError(
                f"{name} ({architecture}) is not a decoder with standard attention: its "
                f"configuration has no {needed}"
            )
    heads = config.num_attention_heads
    layer_types, _ = get_layer_types_and_kwargs(config)
    rope = getattr(config, "rope_parameters", None) or {}
    identity = ModelIdentity(
        name=name,
        architecture=architecture,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context=int(getattr(config, "max_position_embeddings", 0) or 0),
        rope=json.dumps(rope, sort_keys=True, default=str),
        fingerprint="",
    )
    return ModelGeometry(identity, tuple(layer_types))


def fingerprint(model: nn.Module) -> str:
    """A sample of the weights that every engine holds whole, embeddings and norms: bfloat16, hex.

    Values rather than a hash, so that a model loaded in another precision is still itself.
    """
    samples = [_sample(model.get_input_embeddings().weight, 128)]  # type: ignore[operator]
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            samples.append(_sample(parameter, 4))
    return torch.cat(samples).view(torch.int16).numpy().astype("<i2").tobytes().hex()


def _sample(tensor: Tensor, count: int) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // count)][:count].to(torch.bfloat16).cpu()


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The attention module of each layer."""
    return {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "layer_idx") and (hasattr(module, "o_proj") or hasattr(module, "dense"))
    }


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that run one after the other, each with the attention of its number in it."""
    attention = attention_modules(model)
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and attention.keys() <= set(range(len(module)))
            and all(inner in set(module[i].modules()) for i, inner in attention.items())
        ):
            return list(module)
    return []


def require_one_device(model: Any) -> None:
    """Refuse a model whose layers are not all on `model.device`, where the cache will be: kernels
    would read one GPU's memory with pointers into another's."""
    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        for parameter in module.parameters():
            if parameter.device != model.device or parameter.device.type == "meta":
                raise UnsupportedModelError(
                    f"layer {module.layer_idx} of this model is on {parameter.device}, the cache "
                    f"would be on {model.device}; a model that is spread over devices, or partly "
                    "offloaded, is not supported: load all of it onto one device, without "
                    'device_map="auto"'
                )


@dataclass(frozen=True)
class Rope:
    """How one layer turns row vectors at some positions, asked of the model itself: its own
    frequencies, scaling, layout and partial rotation. YaRN's stretching is taken out."""

    apply: Any  # the model's apply_rotary_pos_emb
    cos: Tensor  # fp64 [1, n, rotary]
    sin: Tensor

    def turn(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Rows [m, n, d] of the n positions, turned, or turned back."""
        cos, sin = self.cos.to(rows.dtype), (-self.sin if back else self.sin).to(rows.dtype)
        whole = rows[None]
        try:
            turned, _ = self.apply(whole, whole, cos, sin)
            return turned[0]
        except RuntimeError:  # the model slices off its rotary dimensions before the call
            rotary = self.cos.shape[-1]
            turned, _ = self.apply(whole[..., :rotary], whole[..., :rotary], cos, sin)
            return torch.cat([turned[0], rows[..., rotary:]], -1)


def rope_at(model: Any, layer: int, positions: Tensor) -> Rope | None:
    """A layer's RoPE at positions from 0 on; None without RoPE."""
    module = attention_modules(model).get(layer)
    apply = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    rotary = getattr(model.base_model, "rotary_emb", None) or getattr(module, "rotary_emb", None)
    text = getattr(model.base_model, "language_model", None)
    rotary = rotary or getattr(text, "rotary_emb", None)
    if module is None or apply is None or rotary is None:
        return None
    device = next(model.parameters()).device
    probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
    arguments: dict[str, Any] = {"position_ids": positions[None].to(device)}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        arguments["layer_type"] = getattr(module, "layer_type", FULL)
    cos, sin = rotary(probe, **arguments)
    if not _turns_keys(model, module, cos, sin):
        return None
    scaling = cos[0, 0].abs().max().clamp_min(1e-6)  # YaRN stretches as it turns
    return Rope(apply, cos.double() / scaling, sin.double() / scaling)


def rope_turns(model: Any, layer: int, head_dim: int, offsets: Tensor) -> Tensor | None:
    """How moving by each offset turns a row vector: fp64 [n, d, d], or None without RoPE."""
    rope = rope_at(model, layer, offsets)
    if rope is None:
        return None
    eye = torch.eye(head_dim, dtype=torch.float64, device=rope.cos.device)
    turns = rope.turn(eye[:, None].expand(head_dim, len(offsets), head_dim)).transpose(0, 1)
    if offsets[0] == 0 and not torch.allclose(turns[0], eye, atol=1e-6):
        return None
    return turns


def _turns_keys(model: Any, module: nn.Module, cos: Tensor, sin: Tensor) -> bool:
    """Whether a layer's keys depend on their position: some models have layers without RoPE."""
    parameter = next(module.parameters())
    width = model.config.get_text_config(decoder=True).hidden_size
    hidden = torch.ones(1, 1, width, dtype=parameter.dtype, device=parameter.device)
    keys: list[Tensor] = []

    def observe(_module: nn.Module, _query: Tensor, key: Tensor, *_rest: Any) -> None:
        keys.append(key)

    with attention_implementation(model), observing(observe), torch.no_grad():
        for index in (0, -1):
            at = tuple(x[:, index, None].to(parameter.dtype) for x in (cos, sin))
            module(hidden, position_embeddings=at, attention_mask=None)
    return not torch.equal(*keys)
