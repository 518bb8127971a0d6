"""`oscarkv zoo`, through a calibrated tiny model."""

from collections.abc import Callable
from pathlib import Path

import torch
from commandline import Run

from oscarkv.artifact import load_artifact


def test_paper_goes_out_and_comes_back(run: Run, tiny: Path, text: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "paper.safetensors", tmp_path / "again.safetensors"
    options = ["--recipe", "paper", "--tokens", 1300, "--length", 640, "-o", path]
    assert run("calibrate", tiny, "--text", text, *options).exit_code == 0
    result = run("zoo", "export", path, "-o", tmp_path / "zoo")
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "zoo").iterdir())
    assert [file.name[0] for file in files] == ["k", "v"]
    result = run("zoo", "import", *files, "--model", tiny, "-o", again)
    assert result.exit_code == 0, result.output
    first, second = load_artifact(path), load_artifact(again)
    assert first.recipe == second.recipe
    assert first.model == second.model
    for index, layer in first.layers.items():
        torch.testing.assert_close(second.layers[index].key, layer.key, rtol=0, atol=0)
        torch.testing.assert_close(second.layers[index].value, layer.value, rtol=0, atol=0)
    assert run("inspect", again).exit_code == 0  # though it has no statistics


def test_refusals(refuses: Callable[..., str], tiny: Path, artifact: Path, tmp_path: Path) -> None:
    line = refuses("zoo", "export", artifact, "-o", tmp_path / "zoo")
    assert "'uniform'" in line
    assert "--recipe paper" in line
    missing = tmp_path / "none.pt"
    out = tmp_path / "a.safetensors"
    assert "does not exist" in refuses(
        "zoo", "import", missing, missing, "--model", tiny, "-o", out
    )
    torch.save({"format_version": 1, "layers": {}}, tmp_path / "k.pt")
    files = (tmp_path / "k.pt", tmp_path / "k.pt")
    assert "layer 0, 1 of tiny" in refuses("zoo", "import", *files, "--model", tiny, "-o", out)
    assert "unknown recipe" in refuses(
        "zoo", "import", *files, "--model", tiny, "--recipe", "x", "-o", out
    )
    assert not out.exists()
