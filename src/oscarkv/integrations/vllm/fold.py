"""Values folded into a rank's weights, on request: `"fold_values": true`.

Between loading and vLLM's own processing of weights, which may pack them beyond recognition.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models.utils import extract_layer_index

from oscarkv.errors import UnsupportedModelError
from oscarkv.integrations.folding import folded_output, folded_values
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.impl import OscarImpl
from oscarkv.integrations.vllm.kept import keeps_own_cache
from oscarkv.integrations.vllm.settings import Settings

#: All that an attention module may consist of: with anything else, values might not pass from
#: one projection to the other through attention alone.
PARTS = {"qkv_proj", "o_proj", "attn", "rotary_emb", "q_norm", "k_norm"}


def fold_model(model: nn.Module, settings: Settings) -> None:
    """Fold every packed layer's values; refuses a model where one cannot be folded."""
    for name, module in model.named_modules():
        attention: Any = getattr(module, "attn", None)
        impl = getattr(attention, "impl", None)
        if not isinstance(impl, OscarImpl):
            continue
        index = extract_layer_index(name)
        if keeps_own_cache(attention, index, impl.arguments, settings):
            continue
        _require_plain(module, index)
        _fold(module, impl, settings.loaded.layers[index])
        impl.folded = True


def _require_plain(module: Any, index: int) -> None:
    parts = {name for name, _ in module.named_children()}
    found = sorted(parts - PARTS)
    if getattr(module, "attn_output_gate", False):
        found.append("an output gate")
    kinds = {"qkv_proj": QKVParallelLinear, "o_proj": RowParallelLinear}
    for name, kind in kinds.items():
        linear: Any = getattr(module, name, None)
        if type(linear) is not kind or type(linear.quant_method) is not UnquantizedLinearMethod:
            found.append(f"{name}: not a plain {kind.__name__}")
    if found:
        raise UnsupportedModelError(
            f"layer {index}: values cannot be folded into its weights ({'; '.join(found)}); leave "
            "fold_values out"
        )


def _fold(module: Any, impl: OscarImpl, transforms: Any) -> None:
    qkv, output = module.qkv_proj, module.o_proj
    total = transforms.key_mean.shape[0]
    heads = layers.rank_heads(total, impl.num_kv_heads)
    device = qkv.weight.device
    value, inverse, mean = (
        tensor[heads].to(device)
        for tensor in (transforms.value, transforms.value_inverse, transforms.value_mean)
    )
    rows = slice(-impl.num_kv_heads * impl.head_size, None)  # queries, keys, values
    bias = None if qkv.bias is None else qkv.bias.data[rows]
    weight, shifted = folded_values(qkv.weight.data[rows], bias, value, mean)
    qkv.weight.data[rows] = weight.to(qkv.weight.dtype)
    _bias(qkv, qkv.weight.shape[0])[rows] = shifted.to(qkv.weight.dtype)

    weight, offset = folded_output(output.weight.data, inverse, mean)
    output.weight.data.copy_(weight)
    # One rank adds the bias for all of them.
    offset = tensor_model_parallel_all_reduce(offset.float())
    _bias(output, output.weight.shape[0]).add_(offset)


def _bias(linear: Any, size: int) -> Tensor:
    if linear.bias is None:
        zeros = linear.weight.data.new_zeros(size)
        linear.register_parameter("bias", nn.Parameter(zeros, requires_grad=False))
    data: Tensor = linear.bias.data
    return data
