"""`oscarkv sglang check`, which needs no SGLang. What it shares with vLLM's is tested there."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Run

import oscarkv
from oscarkv.integrations.sglang import fit, fork


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_version", lambda: "0.5.23")


def found(run: Run, *arguments: object, code: int = 0) -> dict:
    result = run("sglang", "check", *arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def problems(answer: dict) -> list[str]:
    return [f["text"] for f in answer["findings"] if f["verdict"] == "problem"]


def test_what_fits_is_counted(run: Run, tiny: Path, artifact: Path) -> None:
    """The tiny model's head_dim is 16: a packed row of a key and a value takes 12 bytes, and 16
    exact ones in bf16 take 1,024; so a page is one of 128 tokens and 1,536 bytes."""
    answer = found(run, tiny, "--artifact", artifact, "--memory", 1, "--context-length", 640,
                   "--sink", 64, "--recent", 256)  # fmt: skip
    assert answer["fits"]
    assert answer["page_tokens"] == 128
    windows = 64 // 16 + (256 + 16) // 16 + 1 + 128 // 16
    token = -(-2 * 2 * 12 * (1 + windows * 128 / 640) // 1)
    assert answer["tokens"] == (1 << 30) // token // 128 * 128
    assert answer["plain_tokens"] == (1 << 30) // (2 * 2 * 64)
    assert answer["pages"] == answer["tokens"] // 128
    assert answer["window_pages"] == answer["tokens"] * windows // 640


def test_an_artifact_of_tune(run: Run, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    """Values of 4 bits in one layer take 4 bytes more a token, of 24 in both; its pages are
    larger."""
    loaded = oscarkv.load_artifact(artifact)
    mixed = dataclasses.replace(loaded, layer_bits={1: (loaded.recipe.key_bits, 4)})
    oscarkv.save_artifact(mixed, tmp_path / "mixed")
    options = ("--memory", 1, "--context-length", 640, "--sink", 64, "--recent", 256)
    even = found(run, tiny, "--artifact", artifact, *options)
    answer = found(run, tiny, "--artifact", tmp_path / "mixed", *options)
    assert answer["fits"]
    assert answer["page_tokens"] == even["page_tokens"]
    assert answer["bits_per_element"] == pytest.approx(even["bits_per_element"] * 28 / 24, rel=0.02)
    assert answer["history_bits_per_element"] == even["history_bits_per_element"] + 0.5
    assert answer["tokens"] == pytest.approx(even["tokens"] * 24 / 28, rel=0.02)
    exact = 2 * 2 * 16 * 2 * 2 * 320
    assert answer["step_bytes"] - exact == (even["step_bytes"] - exact) * 28 // 24


def test_text(run: Run, tiny: Path, artifact: Path) -> None:
    result = run("sglang", "check", tiny, "--artifact", artifact, "--memory", 1, "--recent", 128)
    assert result.exit_code == 0
    for part in ("SGLang 0.5.23", "all 2 are packed", "--engine sglang"):
        assert part in result.stdout
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith(f"python -m sglang.launch_server --model-path {tiny}")
    assert last.endswith("--oscarkv-recent 128")


def test_the_command_has_what_was_given(run: Run, tiny: Path, artifact: Path) -> None:
    given = ["--context-length", "640", "--tp-size", "2", "--dtype", "float16",
             "--mem-fraction-static", "0.5"]  # fmt: skip
    result = run("sglang", "check", tiny, "--artifact", artifact, *given, "--gpu-memory", 2)
    assert result.stdout.strip().splitlines()[-1].endswith(" ".join(given))


def test_a_request_beyond_the_context(run: Run, tiny: Path, artifact: Path) -> None:
    answer = found(run, tiny, "--artifact", artifact, "--context-length", 1025, code=1)
    assert problems(answer)[0].startswith("--context-length 1,025 is above the model's context")


def test_layers_without_transforms(run: Run, tmp_path: Path, tiny: Path, artifact: Path) -> None:
    loaded = oscarkv.load_artifact(artifact)
    del loaded.layers[1]
    oscarkv.save_artifact(loaded, tmp_path / "part")
    answer = found(run, tiny, "--artifact", tmp_path / "part", "--memory", 1, code=1)
    assert "which it cannot have beside oscarkv's" in problems(answer)[0]


def test_too_little_memory_for_one_request(run: Run, tiny: Path, artifact: Path) -> None:
    answer = found(run, tiny, "--artifact", artifact, "--memory", 0.0002, code=1)
    assert "smaller --context-length" in problems(answer)[0]


def test_refusals(refuses: Callable[..., str], tiny: Path, artifact: Path) -> None:
    both = ("--memory", 1, "--mem-fraction-static", 0.5)
    assert "not both" in refuses("sglang", "check", tiny, "--artifact", artifact, *both)


def test_the_forks_variables() -> None:
    said = fork.advice({"SGLANG_MIXED_KV_PREFIX_TOKENS": "64", "SGLANG_LLOYD_MAX": "", "HOME": "x"})
    assert len(said) == 1
    assert said[0].endswith("instead: --oscarkv-sink 64")
    assert all(fork.advice({name: "1"}) for name in fork.VARIABLES)
