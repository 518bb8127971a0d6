"""Values folded into vLLM's weights, on request."""

import pytest

pytest.importorskip("vllm.config")

from engines import TinyModel
from serving_models import prompts

import oscarkv
from oscarkv.errors import OscarError

FOLD = {"fold_values": True}


@pytest.fixture(scope="module", params=["llama", "qwen2"])  # without biases, and with them
def model(request, tmp_path_factory):
    return TinyModel(tmp_path_factory.mktemp(request.param), request.param)


def test_exact_windows_give_stock_tokens(model):
    asked = prompts(5, 300)
    with model.engine() as engine:
        stock = engine.generate(asked)
    with model.engine(FOLD | {"recent": 4096}) as engine:
        attention = [layer for name, layer in engine.layers.items() if "oscarkv" not in name]
        assert all(layer.impl.transforms.value is None for layer in attention)
        assert engine.generate(asked) == stock


def test_small_windows_give_the_tokens_of_folded_oscarcache(model):
    asked = prompts(40, 300)
    attachment = oscarkv.attach(model.model, model.artifact, fold_values=True)
    try:
        expected = model.oracle(asked)
    finally:
        attachment.detach()
    with model.engine(FOLD | {"strict": True}) as engine:
        assert engine.generate(asked) == expected


def test_a_module_with_other_parts_is_refused(model, monkeypatch):
    from oscarkv.integrations.vllm import fold

    monkeypatch.setattr(fold, "PARTS", fold.PARTS - {"rotary_emb"})
    with pytest.raises((OscarError, SystemExit)) as caught, model.engine(FOLD):
        pass
    assert "layer 0: values cannot be folded into its weights (rotary_emb)" in str(caught.value)
