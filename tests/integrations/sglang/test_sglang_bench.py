"""`oscarkv bench serving --engine sglang` with the real engine, on a CPU, with random weights."""

import json

import pytest

pytest.importorskip("sglang.srt.plugins")

from typer.testing import CliRunner

from oscarkv.cli import app

SMALL = "--geometry tiny --memory 0.05 --eager --steps 4 --repeats 1 --shapes 2x300 --prompts 200"
LOAD = "--requests 3 --request-context 900 --new-tokens 4 --recent 64 --sink 16 --prefill both"


@pytest.mark.slow
def test_both_attentions(tmp_path):
    out = tmp_path / "serving.json"
    words = ["bench", "serving", "--engine", "sglang", "--json", str(out)]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, *SMALL.split(), *LOAD.split()])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    stock, mine = record["runs"]
    assert [stock["name"], mine["name"]] == ["torch_native", "oscarkv"]
    for entry in record["runs"]:
        assert entry["status"] == "measured", entry["reason"]
        assert entry["started"]["attention"] == [entry["name"]]
        assert [load["contexts"] for load in entry["loads"]] == ["computed", "real"]
        for load in entry["loads"]:
            assert load["tokens"] == 12
            assert load["most_at_once"] == 3
        computed, real = (load["first_token_s"]["mean"] for load in entry["loads"])
        assert computed < real  # nothing is read
        assert entry["steps"][0]["seconds"] > 0
        assert entry["first_token"][0]["context"] == 200
    assert mine["kv_tokens"] > stock["kv_tokens"]
    assert record["settings"]["load_format"] == "dummy"
    assert "against torch_native" in result.stdout
