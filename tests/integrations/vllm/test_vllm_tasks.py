"""`oscarkv eval tasks --engine vllm` with the real engine, on a CPU, with random weights."""

import json
import os

import pytest

pytest.importorskip("vllm.config")

import engines  # noqa: F401  (sets the environment of engines, which child processes inherit)
import tiny
from typer.testing import CliRunner

from oscarkv.cli import app


def test_exact_windows_give_the_answers_of_stock_vllm(tiny_model, tmp_path):
    tiny.tokenizer().save_pretrained(tiny_model.path)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "tasks.json"
    text = tiny.text(400)
    lines = [{"question": text[20 * n :], "answer": f"#### {n}"} for n in range(4)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    words = ["eval", "tasks", tiny_model.path, "--engine", "vllm", "--tasks", "gsm8k", "--data"]
    words += [f"gsm8k={rows}", "--artifact", tiny_model.artifact, "--recent", 1024, "--json", out]
    words += ["--max-new-tokens", 12, "--engine-option", "enforce_eager=true"]
    result = CliRunner(env={**os.environ, "COLUMNS": "200"}).invoke(app, [str(w) for w in words])
    assert result.exit_code == 0, result.output
    task = json.loads(out.read_text())["tasks"]["gsm8k"]
    assert task["results"]["uniform"]["gap"]["items"] == 4
    texts = [
        [task["answers"][name]["0"][str(n)]["text"] for n in range(4)]
        for name in ("full precision", "uniform")
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
