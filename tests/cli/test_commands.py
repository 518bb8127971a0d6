"""Every command on a tiny model, from calibration to measurement."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import Run

from oscarkv.artifact import load_artifact
from oscarkv.cli import evaluate
from oscarkv.kernels.torch_backend import TorchBackend


def test_help_is_quick() -> None:
    command = [sys.executable, "-c", "from oscarkv.cli import main; main()", "--help"]
    times = []
    for _ in range(2):
        start = time.perf_counter()
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert all(name in result.stdout for name in ("calibrate", "inspect", "eval", "zoo", "demo"))
    print(f"oscarkv --help: {min(times):.2f} s")
    assert min(times) < 3  # 1 s is the aim; slow and loaded machines get some slack


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, oscarkv.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_calibrate_writes_a_usable_artifact(artifact: Path) -> None:
    loaded = load_artifact(artifact)
    assert loaded.model.name == "tiny"  # not the path
    assert sorted(loaded.layers) == [0, 1]
    assert loaded.calibration["length"] == 640


def test_calibrate_options(run: Run, tiny: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    changes = ["--set", "sink=16", "--set", "group_size=none", "--set", "metric_rounding=false"]
    options = ["--tokens", 2048, "--skip-layers", "1", "--recipe", "compact", "-o", path]
    result = run("calibrate", tiny, "--text", text, *changes, *options)
    assert result.exit_code == 0, result.output
    assert "compact for tiny: 1 layers" in result.stdout
    assert "bits at 128K of the packed layers, 1 of 2, mean" in result.stdout
    (line,) = (x for x in run("inspect", path).stdout.splitlines() if "bits per element" in x)
    assert line.rstrip().endswith("of the packed layers, 1 of 2")
    loaded = load_artifact(path)
    assert loaded.recipe.sink == 16
    assert loaded.calibration["length"] == 1024  # the model's context is under 4096


def test_inspect(run: Run, artifact: Path) -> None:
    shown = run("inspect", artifact).stdout
    assert "tiny (LlamaForCausalLM)" in shown
    assert "128K: 3." in shown
    assert "packed layers" not in shown  # all of them
    assert "cond(A)" in shown

    facts = json.loads(run("inspect", artifact, "--json").stdout)
    assert facts["recipe"] == "uniform"
    assert facts["knobs"] == {}
    assert set(facts["bits"]) == {"4096", "8192", "32768", "131072"}
    layer = facts["layers"][0]
    assert 0 < layer["top1"] <= layer["top8"] <= 1.0001
    assert 1 <= layer["effective_rank"] <= 16
    assert layer["condition"] >= 1
    assert 0 < layer["logit_error"] < 1


def test_generate(run: Run, tiny: Path, artifact: Path, other_text: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(other_text.read_text()[:500])
    arguments = ["generate", tiny, "--artifact", artifact, "--prompt-file", prompt]
    result = run(*arguments, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "bits per element" in result.stderr

    both = run(*arguments, "--max-new-tokens", 8, "--compare", "--backend", "torch").stdout
    assert "full precision" in both
    assert "16.00 bits per element" in both
    assert "first difference at new token" in both or "the same 8 tokens" in both

    sampled = [run(*arguments, "--max-new-tokens", 8, "--temperature", 1).stdout for _ in range(2)]
    assert sampled[0] == sampled[1]


def test_short_prompts_are_exact_and_say_so(run: Run, tiny: Path, artifact: Path) -> None:
    result = run(
        "generate", tiny, "--artifact", artifact, "--prompt", "Hello [b]", "--max-new-tokens", 4,
        "--compare",
    )  # fmt: skip
    assert "the same 4 tokens" in result.stdout
    assert "nothing packed was read" in result.stderr


def test_fidelity(
    run: Run, tiny: Path, artifact: Path, text: Path, other_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "fidelity.json"
    result = run(
        "eval", "fidelity", tiny, "--text", other_text, "--artifact", artifact,
        "--recipes", "uniform,paper,bf16", "--calibration-text", text, "--tokens", 1300,
        "--calibration-length", 640, "--length", 640, "--windows", 2, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["format"] == "oscarkv-fidelity-1"
    assert written["model"] == "tiny"
    # The artifact is uniform too, so it goes by the name of its file.
    assert set(written["recipes"]) == {"tiny", "uniform", "paper", "bf16"}
    fields = {"kl", "kl_se", "top1", "ppl_ratio", "bits_128k", "bits_actual"}
    assert fields <= set(written["recipes"]["paper"])
    assert written["recipes"]["bf16"]["top1"] == 1.0
    assert "as decoding reads the cache" in result.stdout


def test_fidelity_warns_about_its_own_text(
    run: Run, tiny: Path, artifact: Path, text: Path
) -> None:
    result = run(
        "eval", "fidelity", tiny, "--text", text, "--artifact", artifact, "--length", 640,
        "--windows", 1, "--no-strict", "--backend", "torch",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "the same text" in result.stderr


def test_backends_reach_the_cache(
    run: Run,
    tiny: Path,
    artifact: Path,
    other_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from oscarkv.integrations.transformers import cache

    asked = []

    def record(name: str, device: object) -> TorchBackend:
        asked.append(name)
        return TorchBackend()

    monkeypatch.setattr(cache, "get_backend", record)
    prompt = other_text.read_text()[:400]
    for backend in ("torch", "auto"):
        chosen = ("--artifact", artifact, "--backend", backend)
        result = run("generate", tiny, "--prompt", prompt, "--max-new-tokens", 2, *chosen)
        assert result.exit_code == 0, result.output
        assert set(asked) == {backend}
        result = run("eval", "fidelity", tiny, "--text", other_text, "--length", 640,
                     "--windows", 1, *chosen)  # fmt: skip
        assert result.exit_code == 0, result.output
        assert set(asked) == {backend}
        assert len(asked) > 2
        asked.clear()


def test_collapsed_recipes_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    from oscarkv.cli.console import results
    from oscarkv.evaluation.fidelity import Fidelity, RecipeScore

    scores = {"good": RecipeScore(kl=0.01, top1=0.95), "bad": RecipeScore(kl=5.0, top1=0.04)}
    results.print(evaluate.fidelity_table(Fidelity("m", "", 1024, 1, True, 9.0, scores)))
    lines = capsys.readouterr().out.splitlines()
    assert [("collapsed" in line) for line in lines if "good" in line or "bad" in line] == [
        False,
        True,
    ]
