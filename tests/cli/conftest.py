"""A tiny random model on disk, and the command line in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from commandline import Run, save_tiny_model
from typer.testing import CliRunner

from oscarkv.cli import app
from oscarkv.demo.run import book


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "train.txt"
    path.write_text(book("alice.txt")[:5000].encode("ascii", "ignore").decode())
    return path


@pytest.fixture(scope="session")
def other_text(text: Path) -> Path:
    path = text.with_name("test.txt")
    path.write_text(book("botchan.txt")[:3000].encode("ascii", "ignore").decode())
    return path


@pytest.fixture(scope="session")
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception  # a bug, not an error a user can act on
        return result

    return invoke


@pytest.fixture(scope="session")
def artifact(run: Run, tiny: Path, text: Path) -> Path:
    """The tiny model's artifact, made by the command itself; rows are those of `uniform`."""
    path = text.with_name("tiny.safetensors")
    sizes = ("--recipe", "uniform", "--tokens", 2000, "--length", 640)
    result = run("calibrate", tiny, "--text", text, *sizes, "-o", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def refuses(run: Run) -> Callable[..., str]:
    """Runs a command that must fail with one line on stderr and exit code 2; returns the line."""

    def invoke(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]

    return invoke
