"""`oscarkv bench serving`: what it refuses, and what becomes of an engine that cannot start."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
import fake_vllm

from oscarkv.benchmark.serving_plan import EnginePlan
from oscarkv.cli import serving


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_refusals(refuses: Callable[..., str], tiny: Path, artifact: Path, tmp_path: Path) -> None:
    def line(*arguments: object) -> str:
        return refuses("bench", "serving", *arguments)

    assert "either a MODEL with --artifact, or --geometry" in line()
    assert "either a MODEL" in line(tiny, "--geometry", "tiny")
    assert "needs its --artifact" in line(tiny)
    assert "does not exist" in line(tiny, "--artifact", tmp_path / "none")
    assert "unknown geometry 'huge'" in line("--geometry", "huge")
    assert "unknown engine 'abacus'" in line("--geometry", "tiny", "--engine", "abacus")
    assert "use computed, real, both" in line("--geometry", "tiny", "--prefill", "never")
    assert "no batch x context" in line("--geometry", "tiny", "--shapes", "1x8,9")
    assert "write NAME=JSON" in line("--geometry", "tiny", "--engine-option", "seed")
    assert "no directory" in line("--geometry", "tiny", "--json", tmp_path / "no" / "x.json")
    nothing = ("--shapes", "none", "--prompts", "none", "--requests", 0)
    assert "nothing to measure" in line("--geometry", "tiny", *nothing)
    assert "no --engines" in line("--geometry", "tiny", "--engines", "none")
    assert "name a .svg or .png file" in line("--geometry", "tiny", "--plot", tmp_path / "x.txt")


@pytest.mark.parametrize("engine", ["oscarkv", "fa3"])
def test_memory_of_sglang_is_that_of_a_gpu(tiny: Path, artifact: Path, engine: str) -> None:
    def tokens(**settings: object) -> int:
        plan = EnginePlan(engine, str(tiny), {"dtype": "auto", **settings}, "real", 256, [])
        return serving._sglang_tokens(plan, 1 << 24, {"artifact": str(artifact)}, 1024)

    assert tokens(tp_size=2) > 1.8 * tokens() > 0
    assert tokens(dtype="float32") < tokens()


def test_a_model_of_ones_own(
    run: Run, tiny: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=":")
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    small = ("--shapes", "2x100", "--steps", 3, "--requests", 2, "--request-context", 50)
    result = run("bench", "serving", tiny, "--artifact", artifact, "--json", out, "--plot", plot,
                 "--engine-option", "seed=1", *small)  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [entry["name"] for entry in record["runs"]] == ["CPU_ATTN", "oscarkv"]
    assert record["model"] == "tiny"
    assert record["settings"]["seed"] == 1
    assert "load_format" not in record["settings"]
    assert record["settings"]["max_model_len"] == record["runs"][0]["started"]["max_model_len"]
    assert "oscarkv: done" in result.stderr
    assert "2 x 100" in result.stdout
    assert plot.stat().st_size > 1000


def test_a_failure_fails_the_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(tmp_path, plugin=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    out = tmp_path / "out.json"
    small = ("--shapes", "1x100", "--steps", 2, "--requests", 0)
    result = run("bench", "serving", "--geometry", "tiny", "--json", out, *small)
    assert result.exit_code == 1
    stock, mine = json.loads(out.read_text())["runs"]
    assert (stock["status"], mine["status"]) == ("measured", "failed")
    assert "did not load oscarkv's plugin" in result.stdout
