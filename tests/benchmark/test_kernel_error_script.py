"""scripts/kernel_error.py, on a tiny model and the torch backend."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from script_modules import load_script
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from oscarkv import Recipe, save_artifact
from oscarkv.integrations.transformers.calibrate import data_free
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.kernels import LayerCache
from oscarkv.kernels.torch_backend import TorchBackend

TOKENS = 436  # of them 16 decoded, the others in chunks of 200, 200 and 20


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("kernel_error")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def measured(script: ModuleType, model: Any, tmp_path: Path) -> Any:
    recipe = Recipe.named("quarot-int2").replace(sink=16, recent=32)
    artifact = data_free(describe(model), [0, 1], recipe)
    save_artifact(artifact, tmp_path / "artifact")
    words = ["model", "--artifact", str(tmp_path / "artifact"), "--text", "unread"]
    chosen = script.arguments([*words, "--chunk", "200", "--device", "cpu"])
    tokens = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return lambda: script.measure(model, tokens, chosen, "torch", "float32")


def test_the_oracle_agrees_with_itself(script: ModuleType, measured: Any) -> None:
    result = measured()
    assert result["tokens"] == TOKENS
    assert result["codes"] == 2 * 2 * 2 * 64 * TOKENS  # layers, keys and values, heads
    assert result["codes_that_differ"] == 0
    assert result["prefill"]["calls"] == 2 * 2  # the first chunk is read by plain attention
    assert result["decode"]["calls"] == 2 * len(script.DECODED)
    for kernel in ("prefill", "decode"):
        assert result[kernel]["largest"] < 1e-5
    assert script.good(result)


def test_what_is_wrong_is_found(
    script: ModuleType, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchBackend.decode

    def wrong(self: TorchBackend, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        right(self, q, layer, out)
        if out.dtype == torch.float32:  # not the oracle
            out[-1, 0] *= 1.05

    monkeypatch.setattr(TorchBackend, "decode", wrong)
    result = measured()
    assert result["decode"]["largest_without_rounding"] > 2e-3
    assert result["decode"]["calls_above_bound"] == result["decode"]["calls"]
    assert not script.good(result)


def test_rounding_is_told_apart(script: ModuleType) -> None:
    summary = script.summary([(3e-3, 2.99e-3), (1e-3, 1e-3), (2.5e-3, 0.0)])
    assert summary["largest"] == 3e-3
    assert summary["of_it_rounding"] == 2.99e-3
    assert summary["calls_above_bound"] == 2
    assert summary["largest_without_rounding"] == 2.5e-3
