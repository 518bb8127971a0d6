"""SmolLM2 answers in SGLang as it does with `OscarCache`; of 20 prompts: serving_agreement.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt.plugins")

SCRIPT = Path(__file__).parents[3] / "scripts" / "serving_agreement.py"
#: As for vLLM: engines that differ by 1e-5 without packing round some 2-bit codes otherwise.
TIPPED = 0.2


@pytest.mark.slow
def test_same_greedy_tokens(tmp_path):
    out = tmp_path / "agreement.json"
    shape = ("--prompts", "1", "--shortest", "800", "--new", "10", "--calibrate", "1024")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--engine", "sglang", *shape, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert [entry["tokens"] for entry in record["prompts"]] == [800]
    assert record["recipe"]["sink"] + record["recipe"]["recent"] < 400
    for entry in record["prompts"]:
        assert entry["median_logprob_difference"] < TIPPED / 10, entry
        assert entry["largest_logprob_difference"] < TIPPED, entry
        parted = entry["margin_where_they_part"]
        assert parted is None or parted < TIPPED, entry
    assert record["prompts"][0]["same_tokens"] > 10 / 2
