"""`"enabled": false` is the one flag back to vLLM's own cache."""

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts


@pytest.mark.parametrize("named", [{"attention_backend": "CUSTOM"},
                                   {"attention_config": {"backend": "CUSTOM"}}])  # fmt: skip
@pytest.mark.parametrize("enabled", [False, True])
def test_the_backend_goes_with_it(tiny_model, named, enabled):
    from vllm.engine.arg_utils import EngineArgs

    section = {"artifact": str(tiny_model.artifact), "enabled": enabled}
    arguments = EngineArgs(
        model=str(tiny_model.path),
        additional_config={"oscarkv": section},
        skip_tokenizer_init=True,
        dtype="float32",
        **named,
    )
    config = arguments.create_engine_config()
    chosen = config.attention_config.backend
    assert (chosen is not None and chosen.name == "CUSTOM") == enabled


def test_tokens_are_stock_ones(tiny_model):
    asked = prompts(300, 40)
    with tiny_model.engine() as engine:
        expected = engine.generate(asked)
    with tiny_model.engine({"enabled": False}, attention_backend="CUSTOM") as engine:
        assert engine.generate(asked) == expected
        assert not any("oscarkv" in name for name in engine.layers)
