"""`oscarkv bench kernels` on a machine without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import Run

from oscarkv.benchmark import timing
from oscarkv.kernels.torch_backend import TorchBackend


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.01)


def test_it_runs_without_a_gpu_and_says_so(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    result = run("bench", "kernels", "--json", out)
    assert result.exit_code == 0, result.output
    assert "no GPU here" in result.stderr
    assert "4/4 prefill" in result.stderr
    assert "torch backend" in result.stdout
    assert "BF16 kernel" in result.stdout
    record = json.loads(out.read_text())
    assert record["format"] == "oscarkv-kernels-1"
    assert record["backend"] == "torch"
    assert record["command"] == f"oscarkv bench kernels --json {out}"
    assert record["gpu"] is None
    assert {"versions", "driver", "device", "date", "backends", "quick"} <= set(record)
    assert set(record["bandwidth_gb_per_s"]) == {"copy", "read"}
    assert {case["kind"] for case in record["cases"]} == {"decode", "write", "prefill"}
    fields = {
        "name", "kind", "query_heads", "kv_heads", "head_dim", "batch", "context", "lengths",
        "new_tokens", "page_size", "values_folded", "status", "reason", "layers", "bytes",
        "floor_us", "time_us", "p10_us", "p90_us", "repeats", "calls_per_repeat", "method",
        "plan_us", "gb_per_s", "share_of_floor", "ratio", "baseline", "no_baseline", "baselines",
        "accuracy",
    }  # fmt: skip
    for case in record["cases"]:
        assert fields <= set(case)
        assert case["status"] == "measured"
        assert case["time_us"] > 0
        assert case["accuracy"]["good"]
        assert (case["baseline"] is None) == bool(case["no_baseline"])


def test_options(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    result = run("bench", "kernels", "--only", "decode", "--no-dense", "--backend", "torch",
                 "--quick", "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert {case["kind"] for case in record["cases"]} == {"decode"}
    assert all(case["ratio"] is None for case in record["cases"])
    words = "--backend torch --quick --only decode --no-dense"
    assert record["command"] == f"oscarkv bench kernels {words} --json {out}"


def test_another_recipe(run: Run, tmp_path: Path, refuses: Callable[..., str]) -> None:
    """Its rows are shorter, and the record says whose they are."""
    sizes = {}
    for recipe in ("balanced", "uniform"):
        out = tmp_path / f"{recipe}.json"
        options = ("--only", "decode", "--no-dense", "--recipe", recipe, "--json", out)
        result = run("bench", "kernels", *options)
        assert result.exit_code == 0, result.output
        record = json.loads(out.read_text())
        sizes[recipe] = record["cases"][0]["bytes"]
        assert ("uniform" in record["cases"][0]["name"]) == (recipe == "uniform")
        assert ("--recipe uniform" in record["command"]) == (recipe == "uniform")
    assert sizes["balanced"] < sizes["uniform"]
    assert "packs nothing" in refuses("bench", "kernels", "--recipe", "bf16")
    out = tmp_path / "more.json"
    options = ("--only", "decode", "--no-dense", "--bits", "3,2", "--json", out)
    assert run("bench", "kernels", *options).exit_code == 0
    record = json.loads(out.read_text())
    assert "balanced 3,2" in record["cases"][0]["name"]
    assert "--bits 3,2" in record["command"]
    assert record["cases"][0]["bytes"] > sizes["balanced"]
    assert "--bits 3: two numbers" in refuses("bench", "kernels", "--bits", "3")


def test_refusals(refuses: Callable[..., str], tmp_path: Path) -> None:
    assert "no case has 'nothing'" in refuses("bench", "kernels", "--only", "nothing")
    assert "unknown backend 'abacus'" in refuses("bench", "kernels", "--backend", "abacus")
    assert "no directory" in refuses("bench", "kernels", "--json", tmp_path / "no" / "x.json")
    assert "cuda backend cannot run here" in refuses("bench", "kernels", "--backend", "cuda")


def test_a_wrong_kernel_fails_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchBackend):
        def decode(self, q, layer, out) -> None:
            out.fill_(1)

    monkeypatch.setattr("oscarkv.kernels.get_backend", lambda name, device: Wrong())
    result = run("bench", "kernels", "--only", "2x1024", "--no-dense")
    assert result.exit_code == 1
    assert "wrong" in result.stdout
