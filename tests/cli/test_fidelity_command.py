"""`oscarkv eval fidelity` and `oscarkv tune` on a tiny model: options, files, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

from oscarkv.artifact import load_artifact

FIT = ["--tokens", 2000, "--calibration-length", 640]


def test_recipes_methods_lengths_and_parts(
    run: Run, tiny: Path, text: Path, other_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.json"
    arguments = ["eval", "fidelity", tiny, "--text", other_text, "--calibration-text", text, *FIT]
    arguments += ["--recipes", "balanced,kivi-2bit,turboquant-3bit-alone,saw-int4"]
    arguments += ["--length", 600, "--windows", 2, "--lengths", "700:1"]
    arguments += ["--sensitivity", "sides,layers", "--part-windows", 1]
    arguments += ["--resume", tmp_path / "parts", "--json", out]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for shown in ("kivi-2bit", "turboquant-3bit-alone", "2 x 600 tokens", "1 x 700 tokens"):
        assert shown in result.stdout
    assert "one part rounded" in result.stdout
    saved = json.loads(out.read_text())
    assert saved["paired_with"] == "balanced"
    assert list(saved["recipes"]) == [
        "balanced",
        "kivi-2bit",
        "turboquant-3bit-alone",
        "saw-int4",
    ]
    assert saved["recipes"]["kivi-2bit"]["simulated"]
    assert not saved["recipes"]["saw-int4"]["simulated"]
    assert saved["recipes"]["saw-int4"]["kl_difference"] < 0
    assert [each["length"] for each in saved["longer"]] == [700]
    assert len(saved["recipes"]["balanced"]["kl_by_position"]) == 1
    assert len(saved["sensitivity"]["balanced"]["parts"]) == 3 + 4
    again = run(*arguments)
    assert again.exit_code == 0
    assert json.loads(out.read_text()) == saved


def test_tune(run: Run, tiny: Path, text: Path, other_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    arguments = ["tune", tiny, "--text", text, *FIT, "--length", 960, "--windows", 1]
    result = run(*arguments, "--bits", 2.8, "-o", out)
    assert result.exit_code == 0, result.output
    assert "layers with more bits" in result.stdout
    tuned = load_artifact(out)
    assert tuned.mixed
    assert 2.5 < tuned.bits() <= 2.8
    shown = run("inspect", out).stdout
    assert "bits K, V" in shown
    assert "3 for" in shown
    assert "predicted" in shown
    assert "layer_costs" not in shown  # they are for --json
    assert "layer_costs" in run("inspect", out, "--json").stdout
    measured = run(
        "eval", "fidelity", tiny, "--text", other_text, "--artifact", out, "--length", 600
    )
    assert measured.exit_code == 2  # too little text for 8 windows
    prompt = other_text.read_text()[:400]
    generated = run("generate", tiny, "--artifact", out, "--prompt", prompt, "--max-new-tokens", 4)
    assert generated.exit_code == 0, generated.output


def test_refusals(
    refuses: Callable[..., str], tiny: Path, text: Path, other_text: Path, tmp_path: Path
) -> None:
    measure = ["eval", "fidelity", tiny, "--text", other_text]
    line = refuses(*measure, "--recipes", "kivi-2bit", "--lengths", "4096")
    assert "--lengths 4096: write LENGTH:WINDOWS" in line
    line = refuses(*measure, "--recipes", "kivi-2bit", "--lengths", "700:1,800:0")
    assert "--lengths 800:0: a length needs at least one window" in line
    line = refuses(*measure, "--recipes", "kivi-2bit", "--sensitivity", "tokens")
    assert "--sensitivity tokens: choose from sides, layers, heads" in line
    line = refuses(*measure, "--recipes", "kvquant-3bit")
    assert "recipe 'kvquant-3bit' is fitted to text" in line
    line = refuses(
        *measure, "--recipes", "kivi-2bit", "--no-strict", "--length", 600, "--windows", 1
    )
    assert "kivi-2bit is simulated, which is measured strictly only" in line
    out = tmp_path / "a.safetensors"
    line = refuses("calibrate", tiny, "--text", text, "--recipe", "kivi-2bit", "-o", out)
    assert "'kivi-2bit' is simulated" in line
    line = refuses("tune", tiny, "--text", text, "-o", out, "--bits", 2.0, *FIT, "--length", 960)
    assert "--bits 2.0: recipe 'compact' takes" in line
    line = refuses("tune", tiny, "--text", text, "-o", out, *FIT, "--length", 700)
    assert "--length 700" in line
    assert "the 320 exact tokens; take 960 or more" in line
    assert not out.exists()


def test_what_cannot_be_measured_is_refused_before_calibrating(
    refuses: Callable[..., str], tiny: Path, text: Path, other_text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr("oscarkv.evaluation.prepare.prepare", never)
    measure = ["eval", "fidelity", tiny, "--text", other_text, "--calibration-text", text]
    measure += ["--length", 600, "--windows", 1, "--recipes"]
    line = refuses(*measure, "balanced,kivi-2bit", "--no-strict")
    assert "kivi-2bit is simulated, which is measured strictly only" in line
    line = refuses(*measure, "balanced", "--sensitivity", "sides", "--part-windows", 50)
    assert "50 were asked for" in line
    line = refuses(*measure, "bf16,balanced", "--sensitivity", "sides")
    assert "'bf16' rounds nothing" in line


def test_fidelity_is_saved_before_its_parts_are_measured(
    run: Run, tiny: Path, other_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("oscarkv.evaluation.sensitivity.measure_sensitivity", interrupted)
    out = tmp_path / "f.json"
    measure = ["eval", "fidelity", tiny, "--text", other_text, "--recipes", "naive-int2"]
    measure += ["--length", 600, "--windows", 1, "--sensitivity", "sides", "--part-windows", 1]
    result = run(*measure, "--json", out)
    assert result.exit_code == 130
    assert f"interrupted; the fidelity is in {out}" in result.stderr
    assert set(json.loads(out.read_text())["recipes"]) == {"naive-int2"}


@pytest.mark.parametrize("name", ["kivi-2bit", "balanced"])
def test_help_names_the_methods(run: Run, name: str) -> None:
    shown = run("eval", "fidelity", "--help").stdout
    assert name in shown
