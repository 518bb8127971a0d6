"""Weights that are loaded again into a running engine (`reload_weights`)."""

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts

from oscarkv.errors import OscarError


def packed(engine):
    return [layer for layer in engine.layers.values() if hasattr(layer, "impl")]


def test_tokens_and_tensors_stay(tiny_model):
    asked = prompts(40, 300)
    with tiny_model.engine({"strict": True}) as engine:
        expected = engine.generate(asked)
        impls = [layer.impl for layer in packed(engine)]
        windows = [impl._windows for impl in impls]
        addresses = [impl.transforms.key.data_ptr() for impl in impls]
        engine.llm.collective_rpc("reload_weights")
        assert [impl._windows for impl in impls] == windows
        assert [engine.layers[impl._windows_name] for impl in impls] == windows
        assert [impl.transforms.key.data_ptr() for impl in impls] == addresses
        assert engine.generate(asked) == expected


def test_folded_values_are_not_loaded_again(tiny_model):
    with (
        tiny_model.engine({"fold_values": True}) as engine,
        pytest.raises(OscarError, match="restart the server"),
    ):
        engine.llm.collective_rpc("reload_weights")
