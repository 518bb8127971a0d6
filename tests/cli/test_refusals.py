"""Bad input: one line that says what to do, exit code 2, and nothing half-written."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import CONTEXT, Run, save_tiny_model

Refuses = Callable[..., str]


def test_calibrate_checks_its_files_before_the_model(
    refuses: Refuses, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("oscarkv.cli.options.load", never)
    out = tmp_path / "a.safetensors"
    base = ("calibrate", "model", "--text", text)
    assert "does not exist" in refuses("calibrate", "m", "--text", tmp_path / "no.txt", "-o", out)
    assert "is a directory" in refuses("calibrate", "m", "--text", tmp_path, "-o", out)
    assert "there is no directory" in refuses(*base, "-o", tmp_path / "no" / "a.safetensors")
    assert "it is a directory" in refuses(*base, "-o", tmp_path)
    assert "unknown recipe 'best'" in refuses(*base, "--recipe", "best", "-o", out)
    assert "unknown recipe knob sunk" in refuses(*base, "--set", "sunk=1", "-o", out)
    assert "takes a whole number" in refuses(*base, "--set", "sink=many", "-o", out)
    assert "takes a number" in refuses(*base, "--set", "ridge=small", "-o", out)
    assert "true or false" in refuses(*base, "--set", "center=maybe", "-o", out)
    assert "KNOB=VALUE" in refuses(*base, "--set", "sink", "-o", out)
    assert "layer numbers" in refuses(*base, "--skip-layers", "first", "-o", out)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "is empty" in refuses("calibrate", "m", "--text", empty, "-o", out)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refuses("calibrate", "m", "--text", binary, "-o", out)
    assert not out.exists()


def test_calibrate_refuses_what_the_model_cannot_do(
    refuses: Refuses, tiny: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    base = ("calibrate", tiny, "--text", text, "-o", out)
    assert f"({CONTEXT} tokens)" in refuses(*base, "--length", 4096)
    assert "--target-length 9999" in refuses(*base, "--target-length", 9999)
    assert "no key was ever read" in refuses(*base, "--tokens", 2048, "--set", "recent=4096")
    assert "cannot skip layer 7" in refuses(*base, "--skip-layers", "7")
    short = tmp_path / "short.txt"
    short.write_text("Too short by far.")
    assert "too little" in refuses("calibrate", tiny, "--text", short, "-o", out)
    assert "no model at" in refuses("calibrate", tmp_path / "none", "--text", text, "-o", out)
    assert "unknown device" in refuses(*base, "--device", "abacus")
    assert "unknown dtype" in refuses(*base, "--dtype", "int3")
    assert list(tmp_path.iterdir()) == [short]


def test_damaged_artifacts(refuses: Refuses, artifact: Path, tmp_path: Path) -> None:
    assert "does not exist" in refuses("inspect", tmp_path / "none.safetensors")
    pickled = tmp_path / "pickled.safetensors"
    torch.save({"a": torch.zeros(2)}, pickled)
    assert "pickled" in refuses("inspect", pickled)
    pickled.write_bytes(pickle.dumps({"a": 1}))
    assert "pickled" in refuses("inspect", pickled)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(artifact.read_bytes()[:-100])
    assert "cut off or damaged" in refuses("inspect", cut)
    assert "cut off" in refuses("generate", "m", "--artifact", cut, "--prompt", "a")


def test_generate_refusals(refuses: Refuses, tiny: Path, artifact: Path, tmp_path: Path) -> None:
    base = ("generate", tiny, "--artifact", artifact)
    assert "the prompt is empty" in refuses(*base, "--prompt", "  ")
    assert "either --prompt or" in refuses(*base)
    assert "either --prompt or" in refuses(*base, "--prompt", "a", "--prompt-file", artifact)
    assert "does not exist" in refuses(*base, "--prompt-file", tmp_path / "no.txt")
    line = refuses(*base, "--prompt", "x" * 1000, "--max-new-tokens", 100)
    assert all(number in line for number in ("1000", "100", "1100", str(CONTEXT)))
    assert "no chat template" in refuses(*base, "--prompt", "a", "--chat")
    assert "unknown backend 'abacus'" in refuses(*base, "--prompt", "a", "--backend", "abacus")
    other = save_tiny_model(tmp_path / "other", layers=3)
    assert "layers 2" in refuses("generate", other, "--artifact", artifact, "--prompt", "a" * 9)


def test_fidelity_refusals(
    refuses: Refuses, tiny: Path, artifact: Path, other_text: Path, tmp_path: Path
) -> None:
    base = ("eval", "fidelity", tiny, "--text", other_text)
    with_artifact = (*base, "--artifact", artifact)
    assert "--artifact, --recipes or both" in refuses(*base)
    assert "unknown recipe 'best'" in refuses(*base, "--recipes", "best")
    line = refuses(*base, "--recipes", "naive-int2,paper")
    assert "'paper'" in line
    assert "--calibration-text" in line
    assert "no directory" in refuses(*with_artifact, "--json", tmp_path / "no" / "x.json")
    assert "does not exist" in refuses(*base, "--artifact", tmp_path / "none.safetensors")
    assert "unknown backend 'abacus'" in refuses(*with_artifact, "--backend", "abacus")
    assert f"context of {CONTEXT}" in refuses(*with_artifact, "--length", 4096)
    assert "are scored" in refuses(*with_artifact, "--length", 513)
    assert "windows of 640" in refuses(*with_artifact, "--length", 640, "--windows", 50)
    assert not list(tmp_path.iterdir())


def test_unusable_backends_are_refused_before_the_model_is_loaded(
    refuses: Refuses, artifact: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("oscarkv.cli.options.load", never)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = ("--artifact", artifact, "--backend")
    for backend in ("cuda", "triton"):
        line = refuses("generate", "m", "--prompt", "a", *chosen, backend)
        assert f"the {backend} backend cannot run here" in line
        line = refuses("eval", "fidelity", "m", "--text", text, *chosen, backend)
        assert f"the {backend} backend cannot run here" in line


def test_demo_needs_matplotlib(
    refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "oscarkv[demo]"' in refuses("demo", "-o", tmp_path / "demo.html")
    assert "no directory" in refuses("demo", "-o", tmp_path / "no" / "demo.html")


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_interrupts_leave_nothing(
    command: str,
    run: Run,
    tiny: Path,
    text: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.update", interrupted)
    if command == "calibrate":
        arguments = ("calibrate", tiny, "--text", text, "--tokens", 1300, "--length", 640, "-o")
    else:
        arguments = ("eval", "fidelity", tiny, "--text", text, "--artifact", artifact,
                     "--length", 640, "--windows", 1, "--json")  # fmt: skip
    result = run(*arguments, tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted; nothing was written" in result.stderr
    assert not list(tmp_path.iterdir())


def test_interrupt_while_writing_leaves_nothing(
    run: Run, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("oscarkv.artifact.files.os.replace", interrupted)
    result = run("calibrate", tiny, "--text", text, "--recipe", "naive-int2", "-o", tmp_path / "a")
    assert result.exit_code == 130
    assert not list(tmp_path.iterdir())
