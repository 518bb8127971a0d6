"""SmolLM2 answers in SGLang as it does with `OscarCache`; of 20 prompts: serving_agreement.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.plugins")

SCRIPT = Path(__file__).parents[3] / "scripts" / "serving_agreement.py"
#: Where prompts are read exactly, few 2-bit codes are tipped by rounding, and nothing follows.
NEAR_TIE = 0.01


@pytest.mark.slow
def test_same_greedy_tokens(tmp_path):
    out = tmp_path / "agreement.json"
    shape = ("--prompts", "1", "--shortest", "1000", "--new", "16", "--calibrate", "1024")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--engine", "sglang", "--as-served", *shape, "--json", out],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert [entry["tokens"] for entry in record["prompts"]] == [1000]
    assert record["recipe"]["sink"] + record["recipe"]["recent"] < 1000
    entry = record["prompts"][0]
    assert entry["largest_logprob_difference"] < NEAR_TIE
    parted = entry["margin_where_they_part"]
    assert parted is None or parted < NEAR_TIE
    assert entry["same_tokens"] > 16 / 2
