"""`oscarkv doctor`: what is here, what is used, and whether it works."""

import json

import pytest
import torch
from commandline import Run

from oscarkv.kernels import BackendStatus, registry
from oscarkv.kernels.torch_backend import TorchBackend


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_names_versions_backends_and_the_choice(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert ["auto", "takes", "torch"] in [[word.strip() for word in line] for line in lines]
    for part in ("oscarkv ", "python ", torch.__version__, "GPU ", "backend torch ", "usable"):
        assert part in result.stdout
    assert "backend cuda" in result.stdout
    assert "not usable: " in result.stdout
    for kernel in ("decode", "write", "prefill"):
        assert f"self-test {kernel}" in result.stdout
    assert "good, relative error" in result.stdout


def test_json(run: Run) -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert {
        "oscarkv",
        "python",
        "torch",
        "triton",
        "cuda-core",
        "transformers",
        "vllm",
        "sglang",
    } <= (set(report["versions"]))
    assert report["gpus"] == []
    assert [backend["name"] for backend in report["backends"]] == ["cuda", "triton", "torch"]
    for backend in report["backends"]:
        assert backend["usable"] == (backend["reason"] is None)
    assert report["chosen"] == "torch"
    test = report["self_test"]
    assert test["good"]
    assert test["seconds"] < 3
    assert all(check["value"] <= check["limit"] for check in test["checks"])
    assert json.loads(run("doctor", "--json", "--no-self-test").stdout)["self_test"] is None


def test_gpus_and_a_backend_that_would_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscarkv.benchmark import machine

    gpu = machine.Gpu(0, "NVIDIA H200", "9.0", 150_000_000_000, 132, 52_428_800)
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    statuses = [BackendStatus("cuda", False, "could not be started: [nvrtc] bad")]
    monkeypatch.setattr("oscarkv.kernels.backend_statuses", lambda: statuses)
    monkeypatch.setattr("oscarkv.cli.doctor._kernel_cache", lambda: "/cache/oscarkv")
    shown = run("doctor", "--no-self-test").stdout
    assert "NVIDIA H200, compute capability 9.0, 150.00 GB" in shown
    assert "not usable: could not be started: [nvrtc] bad" in shown
    assert "/cache/oscarkv" in shown


def test_a_failed_self_test_is_an_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchBackend):
        def decode(self, q, layer, out) -> None:
            pass  # leaves NaN

        def prefill(self, q, k, v, layer, out) -> None:
            raise RuntimeError("an illegal [memory] access")

    broken = registry._Entry(lambda: None, Wrong)
    monkeypatch.setattr(registry, "_ENTRIES", {"torch": broken})
    result = run("doctor")
    assert result.exit_code == 1
    assert "wrong, relative error NaN" in result.stdout
    assert "failed: RuntimeError: an illegal [memory] access" in result.stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert not report["self_test"]["good"]
    assert [check["good"] for check in report["self_test"]["checks"]] == [False, True, False]


def test_what_auto_passes_over_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> TorchBackend:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(registry, "_failed", {})
    entries = {"cuda": registry._Entry(lambda: None, fail), "torch": registry._ENTRIES["torch"]}
    monkeypatch.setattr(registry, "_ENTRIES", entries)
    monkeypatch.setattr(
        "oscarkv.benchmark.run.bench_device", lambda: torch.device("meta")
    )  # not a CPU, so that auto looks at all of them
    result = run("doctor", "--no-self-test")
    assert "warning: the cuda backend could not be started" in " ".join(result.stderr.split())
    assert "not usable: could not be started: RuntimeError: does not compile" in result.stdout


def test_named_backends_are_refused_with_their_reason(
    refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"cuda": registry._Entry(lambda: "no GPU", TorchBackend)}
    monkeypatch.setattr(registry, "_ENTRIES", entries)
    assert "cuda backend cannot run here: no GPU" in refuses("doctor", "--backend", "cuda")
