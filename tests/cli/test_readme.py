"""The README's own example and commands, run as written, but for the model and the texts."""

import re
import shlex
from pathlib import Path

import pytest
from commandline import Run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Path, other_text: Path
) -> Path:
    """A directory with the texts the README speaks of."""
    (tmp_path / "book.txt").write_text(text.read_text())
    (tmp_path / "other.txt").write_text(other_text.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_example_runs(
    directory: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example.replace('"smollm2"', repr(str(tiny))), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("The sea was")
    assert int(printed.split()[-1]) > 0
    assert (directory / "smollm2.safetensors").is_file()


def test_the_shell_commands_run(directory: Path, tiny: Path, run: Run) -> None:
    joined = README.replace("\\\n", " ")
    commands = [shlex.split(c) for c in re.findall(r"^    (oscarkv .*)$", joined, re.MULTILINE)]
    expected = ["calibrate", "tune", "inspect", "generate", "eval"]
    assert [command[1] for command in commands] == expected
    for _, *arguments in commands:
        if arguments[0] in ("eval", "tune"):  # defaults are for real models and long texts
            arguments += ["--length", "960", "--windows", "1", "--tokens", "2000"]
        # The tiny model's heads are narrow: parameters alone take half a bit.
        ours = {"smollm2": str(tiny), "2.3": "2.8"}
        result = run(*(ours.get(argument, argument) for argument in arguments))
        assert result.exit_code == 0, result.output
    assert (directory / "fidelity.json").is_file()


def test_its_two_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
