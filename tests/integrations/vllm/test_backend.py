"""What vLLM's CUDA platform asks the backend about each layer, and which layers are refused."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.config")

import torch

from oscarkv.errors import OscarError


def reasons(**asked):
    """Why vLLM would not take our backend for a layer."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from oscarkv.integrations.vllm.backend import OscarBackend

    layer = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    layer |= {"block_size": None} | asked
    return OscarBackend.validate_configuration(
        device_capability=DeviceCapability(9, 0), **AttentionSelectorConfig(**layer)._asdict()
    )


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"has_sliding_window": True},
        {"has_sink": True},
        {"has_sliding_window": True, "has_sink": True, "head_size": 64},
        {"kv_cache_dtype": "bfloat16", "use_per_head_quant_scales": True},
        {"kv_cache_dtype": "float16", "dtype": torch.float16},
    ],
)
def test_layers_that_are_packed_or_kept(asked):
    assert reasons(**asked) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_mla": True}, "MLA not supported"),
    ],
)
def test_layers_that_nobody_serves(asked, reason):
    assert reasons(**asked) == [reason]


def test_a_layer_whose_backend_is_wrapped():
    """As vLLM does for chunked, encoder and cross attention: handed over, it would be plain."""
    from vllm.model_executor.layers.attention.encoder_only_attention import (
        create_encoder_only_attention_backend,
    )

    from oscarkv.integrations.vllm.kept import first_backend, require_unwrapped

    require_unwrapped(SimpleNamespace(attn_backend=first_backend()), "model.layers.0.attn")
    wrapped = create_encoder_only_attention_backend(first_backend())
    with pytest.raises(OscarError, match=r"model.layers.1.attn is a .*neither packed nor kept"):
        require_unwrapped(SimpleNamespace(attn_backend=wrapped), "model.layers.1.attn")
