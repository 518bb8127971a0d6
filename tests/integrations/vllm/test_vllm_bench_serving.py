"""`oscarkv bench serving` with the real engine, on a CPU, with random weights."""

import json
import os

import pytest

pytest.importorskip("vllm.config")

import engines  # noqa: F401  (sets the environment of engines, which child processes inherit)
from typer.testing import CliRunner

from oscarkv.cli import app

SMALL = "--geometry tiny --memory 0.05 --eager --steps 4 --repeats 1 --shapes 2x300 --prompts 200"


@pytest.fixture
def run(tmp_path):
    out = tmp_path / "serving.json"

    def invoke(*arguments):
        words = ["bench", "serving", "--json", str(out), *SMALL.split(), *map(str, arguments)]
        result = CliRunner(env={**os.environ, "COLUMNS": "200"}).invoke(app, words)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result, json.loads(out.read_text())

    return invoke


@pytest.mark.parametrize(
    ("prefill", "phases"),
    [pytest.param("real", ["real"], marks=pytest.mark.slow), ("both", ["computed", "real"])],
)
def test_both_engines(run, prefill, phases):
    load = ("--requests", 3, "--request-context", 100, "--new-tokens", 4)
    result, record = run(*load, "--prefill", prefill, "--recent", 64, "--sink", 16)
    assert result.exit_code == 0, result.output
    stock, mine = record["runs"]
    assert [stock["name"], mine["name"]] == ["CPU_ATTN", "oscarkv"]
    for entry in record["runs"]:
        assert entry["status"] == "measured", entry["reason"]
        assert [load["contexts"] for load in entry["loads"]] == phases
        assert {load["tokens"] for load in entry["loads"]} == {12}
        assert entry["steps"][0]["seconds"] > 0
        assert entry["steps"][0]["contexts"] == phases[0]
        assert entry["first_token"][0]["context"] == 200
    assert mine["started"]["attention"] == ["oscarkv.integrations.vllm.impl.OscarImpl"]
    assert "oscarkv" not in stock["started"]["attention"][0]
    assert mine["kv_tokens"] > stock["kv_tokens"]
    assert record["settings"]["load_format"] == "dummy"
    assert "against CPU_ATTN" in result.stdout


def test_a_refusal_of_the_plugin_is_reported(run):
    result, record = run("--requests", 0, "--engines", "oscarkv", "--engine-option",
                         "kv_cache_dtype=\"fp8\"")  # fmt: skip
    assert result.exit_code == 1
    assert "--kv-cache-dtype fp8" in record["runs"][0]["reason"]
