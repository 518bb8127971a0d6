"""What cannot work is refused in the process that starts the engine, in one line."""

import pytest

pytest.importorskip("vllm.config")

import oscarkv
from oscarkv.errors import OscarError


@pytest.mark.parametrize(
    ("options", "knobs", "message"),
    [
        ({"artifact": "/nowhere.safetensors"}, {}, "does not exist"),
        ({"sinks": 3}, {}, "unknown oscarkv option sinks; known: artifact"),
        ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({}, {"block_size": 64}, "--block-size 64: pages hold 224 tokens"),
        ({}, {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"recent": 0}, {}, "recent is 0"),
        ({"artifact": None}, {}, "needs an artifact"),
    ],
)
def test_refused(tiny_model, options, knobs, message):
    with pytest.raises(OscarError, match=message) as caught:
        config(tiny_model, options, **knobs)
    assert "\n" not in str(caught.value)


def test_another_model(tiny_model, tmp_path):
    import dataclasses

    other = oscarkv.load_artifact(tiny_model.artifact)
    other.model = dataclasses.replace(other.model, layers=4)
    oscarkv.save_artifact(other, tmp_path / "other")
    with pytest.raises(OscarError, match=r"layers 4.*has layers 2"):
        config(tiny_model, {"artifact": str(tmp_path / "other")})


def test_description(tiny_model):
    from oscarkv.integrations.vllm.check import describe
    from oscarkv.integrations.vllm.settings import settings_of

    made = config(tiny_model, {})
    text = describe(made, settings_of(made))
    assert "pages of 224 tokens; at 2,048 tokens" in text
    assert "x the tokens of a float32 cache" in text


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.32.0", True), ("0.32.0+cpu", True), ("0.33.1", False), ("0.3.2", False)],
)
def test_versions(version, known):
    from oscarkv.integrations.vllm.plugin import check_version

    if known:
        check_version(version)
    else:
        with pytest.raises(OscarError, match=f"this is {version}"):
            check_version(version)


def config(tiny_model, options, **knobs):
    from vllm.engine.arg_utils import EngineArgs

    section = {"artifact": str(tiny_model.artifact)} | options
    if section["artifact"] is None:
        del section["artifact"]
    knobs = {"max_model_len": 2048, "dtype": "float32", "skip_tokenizer_init": True} | knobs
    arguments = EngineArgs(
        model=str(tiny_model.path), additional_config={"oscarkv": section}, **knobs
    )
    return arguments.create_engine_config()
