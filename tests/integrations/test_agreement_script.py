"""scripts/serving_agreement.py, where it needs no engine: two records side by side."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
from script_modules import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    with mock.patch.dict(os.environ):  # the script sets some, for engines
        return load_script("serving_agreement")


def record(*prompts):
    """Of (same tokens as OscarCache, margin there, answer)."""
    names = ("same_tokens", "margin_where_they_part", "answer")
    entries = [{"tokens": 1000} | dict(zip(names, prompt, strict=True)) for prompt in prompts]
    return {"recipe": {"sink": 64, "recent": 256}, "new_tokens": 3, "prompts": entries}


def test_two_records(script):
    one = record((3, None, [1, 2, 3]), (3, None, [1, 2, 3]), (1, 0.5, [1, 4, 5]))
    other = record((3, None, [1, 2, 3]), (2, 0.25, [1, 2, 4]), (1, 0.5, [1, 4, 6]))
    assert script.compare_records(one, other) == [
        "1000 tokens: 3 of 3 the same",
        "1000 tokens: 2 of 3 the same, margin where they part: 0.25 nats",
        "1000 tokens: 2 of 3 the same, margin where they part: unknown",
        "all tokens the same: 1 of 3",
    ]


def test_records_of_other_prompts(script):
    one, other = record((3, None, [1, 2, 3])), record((3, None, [1, 2, 3]))
    other["prompts"][0]["tokens"] = 1001
    with pytest.raises(SystemExit, match="differ in their prompts"):
        script.compare_records(one, other)


def test_the_records_in_the_repository(script, monkeypatch, capsys):
    """The docs' comparison of the plugins."""
    names = ("sglang-agreement-served-smollm2", "vllm-agreement-served-torch-smollm2")
    paths = [f"docs/results/{name}.json" for name in names]
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    assert f"serving_agreement.py --compare {' '.join(paths)}" in text
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["serving_agreement.py", "--compare", *paths])
    script.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert last == "all tokens the same: 20 of 20"
