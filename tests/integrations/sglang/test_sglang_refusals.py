"""What cannot work is refused in the process that starts the server, in one line."""

import dataclasses
import subprocess

import pytest

pytest.importorskip("sglang.srt.plugins")

from schedulers import KNOBS, engine
from serving_models import TinyModel, prompts
from sglang_servers import command

import oscarkv
from oscarkv.errors import OscarError


def config(model, options, **knobs):
    """What SGLang makes of a server's arguments."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins

    load_plugins()
    section = {"artifact": str(model.artifact)} | options
    ours = {f"oscarkv_{name}": value for name, value in section.items() if value is not None}
    knobs = KNOBS | {"model_path": str(model.path), "attention_backend": "oscarkv"} | knobs | ours
    arguments = Engine.server_args_class(**knobs)
    arguments.resolve_once()
    return arguments


@pytest.mark.parametrize(
    ("options", "knobs", "message"),
    [
        ({"artifact": "/nowhere.safetensors"}, {}, "does not exist"),
        ({"sinks": 3}, {}, "unknown oscarkv option sinks; known: artifact"),
        ({"artifact": None}, {}, "needs an artifact: --oscarkv-artifact FILE"),
        ({"recent": 0}, {}, "recent is 0"),
        ({"recent": -1}, {}, "option recent is -1; it wants a number of tokens"),
        ({"strict": "yes"}, {}, "option strict is 'yes'; it wants true or false"),
        ({"backend": "mine"}, {}, "option backend is 'mine'; it wants one of auto, cuda"),
        ({}, {"attention_backend": "torch_native"}, "say --attention-backend oscarkv"),
        ({}, {"decode_attention_backend": "triton"}, "triton beside it"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: the cache is oscarkv's"),
        ({}, {"page_size": 64}, "--page-size 64: pages hold 256 tokens; leave it out"),
        ({}, {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({}, {"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({}, {"pp_size": 2}, "pipeline parallelism"),
        ({}, {"enable_priority_scheduling": True}, "add --disable-priority-preemption"),
        ({"skip": [0]}, {}, "oscarkv_skip: the SGLang plugin has no such option"),
        ({"enabled": False}, {}, "oscarkv_enabled: the SGLang plugin has no such option"),
    ],
)
def test_refused(tiny_model, options, knobs, message):
    with pytest.raises(OscarError, match=message) as caught:
        config(tiny_model, options, **knobs)
    assert "\n" not in str(caught.value)


def test_what_is_settled(tiny_model):
    from sglang.srt.arg_groups.overrides import resolved_view

    made = resolved_view(config(tiny_model, {}))
    assert made.attention_backend == made.radix_cache_backend == "oscarkv"
    assert made.page_size == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, r"layers 4.*has layers 2"),
        ({"query_heads": 8}, r"query_heads 8.*has query_heads 4"),
        ({"rope": '{"rope_theta": 500000.0}'}, "with RoPE"),
    ],
)
def test_another_model(tiny_model, tmp_path, change, message):
    other = oscarkv.load_artifact(tiny_model.artifact)
    other.model = dataclasses.replace(other.model, **change)
    oscarkv.save_artifact(other, tmp_path / "other")
    with pytest.raises(OscarError, match=message):
        config(tiny_model, {"artifact": str(tmp_path / "other")})


def test_layers_without_transforms(tiny_model, tmp_path):
    part = oscarkv.load_artifact(tiny_model.artifact)
    del part.layers[1]
    oscarkv.save_artifact(part, tmp_path / "part")
    with pytest.raises(OscarError, match=r"layers \[1\] have no transforms"):
        config(tiny_model, {"artifact": str(tmp_path / "part")})


def test_other_weights(tiny_model, tmp_path):
    other = TinyModel(tmp_path, seed=1)
    options = {"artifact": str(other.artifact)}
    with pytest.raises(OscarError, match="has others") as caught, engine(tiny_model, options):
        pass
    assert "\n" not in str(caught.value)
    with engine(tiny_model, options, load_format="dummy") as started:
        assert started.generate(prompts(20), 2)


@pytest.mark.parametrize("chunk", [2048, 256])
def test_too_little_memory(tiny_model, chunk):
    """The length that is suggested is admitted, and read to its end."""
    knobs = {"context_length": 4096, "max_total_tokens": 2048}
    with (
        pytest.raises(OscarError, match="too little memory for one sequence of 4,096") as caught,
        engine(tiny_model, {}, **knobs),
    ):
        pass
    assert "\n" not in str(caught.value)
    fits = int(str(caught.value).rpartition(" ")[2])
    knobs |= {"context_length": fits, "chunked_prefill_size": chunk}
    with engine(tiny_model, {}, **knobs) as started:
        assert len(started.generate(prompts(fits - 8), 4)[0]) == 4


def test_a_backend_that_cannot_run_here(tiny_model):
    with pytest.raises(OscarError, match="cuda"), engine(tiny_model, {"backend": "cuda"}):
        pass


def test_a_hook_that_was_not_applied(tiny_model, monkeypatch):
    """SGLang logs that and goes on; the plugin does not."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    target = "sglang.srt.mem_cache.common.release_kv_cache"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(OscarError, match=f"did not take effect: {target}"), engine(tiny_model, {}):
        pass


@pytest.mark.parametrize(
    ("version", "known"), [("0.5.23", True), ("0.5.23.post1", True), ("0.5.24", False)]
)
def test_versions(version, known):
    from oscarkv.integrations.sglang.plugin import check_version

    if known:
        check_version(version)
    else:
        with pytest.raises(OscarError, match=f"this is {version}"):
            check_version(version)


# -- users of the fork -----------------------------------------------------------------------------


def test_variables_of_the_fork(tiny_model, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_MIXED_KV_RECENT_TOKENS", "256")
    monkeypatch.setenv("SGLANG_OSCAR_K_ROTATION_PATH", "/k.pt")
    with caplog.at_level("WARNING", logger="sglang.oscarkv"):
        config(tiny_model, {})
    said = [record.message for record in caplog.records if "OSCAR fork" in record.message]
    assert len(said) == 2
    assert said[0].endswith("instead: --oscarkv-recent 256")
    assert "oscarkv zoo import K.pt V.pt" in said[1]


def test_arguments_of_the_fork():
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    for given, instead in [
        (("--kv-cache-dtype", "int2"), "int2 is the OSCAR fork's; instead: --attention-backend"),
        (("--kv-cache-quant-group-size", "64"), "instead: the artifact's recipe says it"),
    ]:
        with pytest.raises(OscarError, match=instead):
            prepare_server_args(["--model-path", "any", *given])


# -- what a user sees ------------------------------------------------------------------------------


def lines_of(model, *arguments):
    """What a server that refuses to start leaves behind."""
    done = subprocess.run(command(model, *arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if "oscarkv: " in line]


@pytest.mark.slow
def test_the_user_sees_one_line(tiny_model):
    (line,) = lines_of(tiny_model, "--page-size", "64")
    assert line.startswith("oscarkv: oscarkv cannot be used with --page-size 64")


@pytest.mark.slow
def test_the_user_sees_one_line_of_another_process(tiny_model):
    (line,) = lines_of(tiny_model, "--max-total-tokens", "2048", "--skip-tokenizer-init")
    assert line.startswith("oscarkv: too little memory for one sequence of 4,096")
