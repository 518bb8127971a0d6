"""What cannot work is refused in the process that starts the engine, in one line."""

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.config")

import engines
from serving_models import prompts

import oscarkv
from oscarkv.errors import OscarError
from oscarkv.integrations.serving import settings


@pytest.mark.parametrize(
    ("options", "knobs", "message"),
    [
        ({"artifact": "/nowhere.safetensors"}, {}, "does not exist"),
        ({"sinks": 3}, {}, "unknown oscarkv option sinks; known: artifact"),
        ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({}, {"block_size": 64}, "--block-size 64: pages hold 224 tokens"),
        ({}, {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"recent": 0}, {}, "recent is 0"),
        ({"recent": -1}, {}, "option recent is -1; it wants a number of tokens"),
        ({"recent": "all"}, {}, "option recent is 'all'"),
        ({"strict": "yes"}, {}, "option strict is 'yes'; it wants true or false"),
        ({"backend": "mine"}, {}, "option backend is 'mine'; it wants one of auto, cuda"),
        ({"artifact": None}, {}, "needs an artifact"),
        ({"fold_values": 1}, {}, "option fold_values is 1; it wants true or false"),
        ({"fold_values": True}, {"enable_lora": True}, "fold_values and LoRA"),
    ],
)
def test_refused(tiny_model, options, knobs, message):
    with pytest.raises(OscarError, match=message) as caught:
        config(tiny_model, options, **knobs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "changes", "message"),
    [
        ("model_config", {"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ("model_config", {"is_mm_prefix_lm": True}, "images whose tokens see each other"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "context parallelism"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_refused_on_gpus(tiny_model, owner, changes, message):
    """What vLLM does not take on a CPU, or for this model, is put into a configuration later."""
    from oscarkv.integrations.vllm.check import check_config

    made = config(tiny_model, {})
    check_config(made)
    for name, value in changes.items():
        setattr(getattr(made, owner), name, value)
    with pytest.raises(OscarError, match=message) as caught:
        check_config(made)
    assert "\n" not in str(caught.value)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "config_groups": {},
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}
MODEL_OPTIMIZER = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []},
}


@pytest.mark.parametrize("said", [COMPRESSED, MODEL_OPTIMIZER], ids=["scheme", "algorithm"])
def test_a_checkpoint_that_asks_for_an_fp8_cache(tiny_model, said):
    knobs = {"hf_overrides": {"quantization_config": said}, "dtype": "bfloat16"}
    with pytest.raises(OscarError, match="the checkpoint asks for: add --kv-cache-dtype bfloat16"):
        config(tiny_model, {}, **knobs)
    config(tiny_model, {}, kv_cache_dtype="bfloat16", **knobs)


@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_cache_in_the_models_dtype(tiny_model, dtype, cache):
    assert config(tiny_model, {}, dtype=dtype, kv_cache_dtype=dtype)
    with pytest.raises(OscarError, match=f"--kv-cache-dtype {cache}: the cache is oscarkv's"):
        config(tiny_model, {}, dtype=dtype, kv_cache_dtype=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, r"layers 4.*has layers 2"),
        ({"kv_heads": 1}, r"kv_heads 1.*has kv_heads 2"),
        ({"query_heads": 8}, r"query_heads 8.*has query_heads 4"),
    ],
)
def test_another_model(tiny_model, tmp_path, change, message):
    other = oscarkv.load_artifact(tiny_model.artifact)
    other.model = dataclasses.replace(other.model, **change)
    if "kv_heads" in change:
        for layer in other.layers.values():
            for name, tensor in layer.tensors().items():
                axis = 1 if name in ("exponents", "errors") else 0
                setattr(layer, name, tensor.narrow(axis, 0, 1))
    oscarkv.save_artifact(other, tmp_path / "other")
    with pytest.raises(OscarError, match=message):
        config(tiny_model, {"artifact": str(tmp_path / "other")})


def test_files_that_are_no_artifacts(tiny_model, tmp_path):
    weights = next(tiny_model.path.glob("*.safetensors"))
    (tmp_path / "cut").write_bytes(tiny_model.artifact.read_bytes()[:5000])
    for file, message in [(weights, "not an oscarkv artifact"), (tmp_path / "cut", "cut off"),
                          (tmp_path, "is a directory")]:  # fmt: skip
        with pytest.raises(OscarError, match=message) as caught:
            config(tiny_model, {"artifact": str(file)})
        assert "\n" not in str(caught.value)


def test_a_section_that_is_none(tiny_model):
    from oscarkv.integrations.vllm.settings import settings_of

    with pytest.raises(OscarError, match="\"oscarkv\": 'on' in --additional-config"):
        settings_of(SimpleNamespace(additional_config={"oscarkv": "on"}))


def test_backends_are_those_there_are():
    from oscarkv.integrations.serving.settings import BACKENDS

    assert list(BACKENDS) == [status.name for status in oscarkv.kernels.backend_statuses()]


# -- memory: known once the model is loaded ------------------------------------------------------


#: Blocks: enough for what vLLM charges a request of 2,048 tokens, too few for its prompt.
POOL = 36


def test_one_block_too_few(tiny_model):
    """The largest length that is suggested is admitted, and one block less refuses it."""
    knobs = {"max_model_len": 2048, "max_num_batched_tokens": 512}
    with (
        pytest.raises(OscarError, match="too little memory for one sequence of 2,048") as caught,
        tiny_model.engine({}, num_gpu_blocks_override=POOL, **knobs),
    ):
        pass
    assert "\n" not in str(caught.value)
    fits = int(str(caught.value).rpartition(" ")[2])
    assert 224 < fits < 2048
    knobs |= {"max_model_len": fits, "num_gpu_blocks_override": POOL}
    with tiny_model.engine({}, **knobs) as engine:
        made = engine.generate(prompts(fits - 4), 4)
        assert len(made[0]) == 4
    with (
        pytest.raises(OscarError, match="too little memory"),
        tiny_model.engine({}, **knobs | {"num_gpu_blocks_override": POOL - 1}),
    ):
        pass


def test_vllms_own_check_is_one_line_too(tiny_model):
    with (
        pytest.raises(OscarError, match="KV cache is needed") as caught,
        tiny_model.engine({}, num_gpu_blocks_override=8),
    ):
        pass
    assert "\n" not in str(caught.value)


# -- what a user sees ------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=2048, max_num_seqs=8, **json.loads(sys.argv[2]))
"""


def refused_start(tiny_model, folder, options, **knobs):
    """Lines on stderr of a script that starts an engine with processes of its own."""
    script = folder / "start.py"
    script.write_text(SCRIPT)
    section = {"artifact": str(tiny_model.artifact)} | options
    knobs["additional_config"] = {"oscarkv": section}
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model.path), json.dumps(knobs)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if "oscarkv: " in line]


def test_the_user_sees_one_line(tiny_model, tmp_path):
    (line,) = refused_start(tiny_model, tmp_path, {"sinks": 3})
    assert line.startswith("oscarkv: unknown oscarkv option sinks")


def test_the_user_sees_one_line_of_another_process(tiny_model, tmp_path):
    (line,) = refused_start(tiny_model, tmp_path, {}, num_gpu_blocks_override=POOL)
    assert line.startswith("oscarkv: too little memory for one sequence")


# -- the weights and their RoPE ------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """An artifact of a model of the same shape."""
    other = engines.TinyModel(tmp_path_factory.mktemp("other"), seed=1)
    return {"artifact": str(other.artifact)}


def test_other_weights(tiny_model, other_weights):
    with (
        pytest.raises(OscarError, match="has others") as caught,
        tiny_model.engine(other_weights),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_dummy_weights_are_nobodys(tiny_model, other_weights):
    with tiny_model.engine(other_weights, load_format="dummy") as engine:
        assert engine.generate(prompts(20), 2)


@pytest.mark.parametrize(
    ("sample", "message"),
    [(3, "has others"), (128 + 5, "has others"), (None, None), ("bad", "unreadable")],
    ids=["embeddings", "norms", "unknown", "damaged"],
)
def test_one_value_of_the_fingerprint(tiny_model, tmp_path, sample, message):
    artifact = oscarkv.load_artifact(tiny_model.artifact)
    known = artifact.model.fingerprint
    if sample is None:
        known = ""
    elif sample == "bad":
        known = "not hex"
    else:
        known = known[: 4 * sample] + "0042" + known[4 * sample + 4 :]  # 32
    artifact.model = dataclasses.replace(artifact.model, fingerprint=known)
    oscarkv.save_artifact(artifact, tmp_path / "changed")
    refused = pytest.raises(OscarError, match=message) if message else nullcontext()
    with refused, tiny_model.engine({"artifact": str(tmp_path / "changed")}):
        pass


def test_rope(tiny_model, tmp_path):
    artifact = oscarkv.load_artifact(tiny_model.artifact)
    for rope, refused in [("", False), ('{"rope_theta": 500000.0}', True)]:
        artifact.model = dataclasses.replace(artifact.model, rope=rope)
        oscarkv.save_artifact(artifact, tmp_path / "rope")
        settings._load.cache_clear()
        options = {"artifact": str(tmp_path / "rope")}
        with pytest.raises(OscarError, match="with RoPE") if refused else nullcontext():
            config(tiny_model, options)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_the_user_sees_one_line_of_two_ranks(tiny_model, tmp_path, other_weights, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    (line,) = refused_start(tiny_model, tmp_path, other_weights, tensor_parallel_size=2)
    assert line.startswith("oscarkv: this artifact was calibrated for the weights of")


def test_the_backend_without_its_options(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    knobs = {"dtype": "float32", "skip_tokenizer_init": True, "attention_backend": "CUSTOM"}
    with pytest.raises(OscarError, match="CUSTOM is oscarkv's, which needs an artifact"):
        EngineArgs(model=str(tiny_model.path), **knobs).create_engine_config()


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


UNKNOWN_VERSION = """
import sys
from oscarkv.integrations.vllm import plugin
plugin.engine_version = lambda: "0.99.0"
plugin.register()
from vllm.engine.arg_utils import EngineArgs

arguments = EngineArgs(model=sys.argv[1], dtype="float32", skip_tokenizer_init=True)
arguments.create_engine_config()
print("left alone")
arguments.additional_config = {"oscarkv": {"artifact": sys.argv[2]}}
arguments.create_engine_config()
"""


def test_an_unknown_version_stops_only_those_who_ask(tiny_model):
    """In a process of its own, since vLLM's classes are wrapped once."""
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN_VERSION, str(tiny_model.path), str(tiny_model.artifact)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "left alone" in done.stdout
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("oscarkv: oscarkv's vLLM plugin knows vLLM 0.32")


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
