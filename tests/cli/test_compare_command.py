"""`oscarkv compare`: from records, and measured by itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

pytest.importorskip("matplotlib")


def test_a_page_is_measured_and_made_again_from_its_records(
    run: Run, tiny: Path, text: Path, other_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    words = ["--recipes", "quarot-int2,naive-int2", "--text", other_text]
    result = run("compare", tiny, *words, "--length", 640, "--windows", 2, "-o", out)
    assert result.exit_code == 0, result.output
    record = tmp_path / "page-records" / "fidelity.json"
    assert set(json.loads(record.read_text())["recipes"]) == {"quarot-int2", "naive-int2"}
    first = out.read_text()
    assert "quarot-int2" in first
    out.unlink()
    assert run("compare", "tiny", "--from", record, "-o", out).exit_code == 0
    assert "quarot-int2" in out.read_text()


def test_fidelity_goes_on_from_what_is_kept(
    run: Run, tiny: Path, text: Path, other_text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keep = tmp_path / "kept"
    words = ["compare", tiny, "--recipes", "paper", "--text", other_text, "--calibration-text"]
    words += [text, "--tokens", 2000, "--length", 640, "--windows", 2, "--keep", keep]
    words += ["-o", tmp_path / "page.html"]
    assert run(*words).exit_code == 0
    record = (keep / "fidelity.json").read_text()

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr("oscarkv.evaluation.fidelity._score", never)
    monkeypatch.setattr("oscarkv.evaluation.prepare.calibrate_many", never)
    assert run(*words).exit_code == 0
    assert (keep / "fidelity.json").read_text() == record


def test_compare_refuses_what_cannot_work(
    refuses: Callable[..., str], tiny: Path, artifact: Path, tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "page.html")
    assert "nothing to show" in refuses("compare", tiny, *out)
    assert "--text" in refuses("compare", tiny, "--artifact", artifact, *out)
    assert "does not exist" in refuses("compare", tiny, "--from", "none.json", *out)
    assert "--calibration-text" in refuses(
        "compare", tiny, "--recipes", "balanced", "--text", artifact, *out
    )
