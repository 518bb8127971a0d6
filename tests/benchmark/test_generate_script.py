"""scripts/bench_generate.py, on a tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from script_modules import load_script

from oscarkv import OscarCache


@pytest.fixture
def script() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    yield load_script("bench_generate")
    torch.set_num_threads(threads)


def test_it_runs_on_the_cpu(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "generate.json"
    script.main(["--tiny", "--device", "cpu", "--json", str(out)])
    record = json.loads(out.read_text())
    assert record["format"] == "oscarkv-generate-1"
    assert [row["context"] for row in record["contexts"]] == [512, 1024]
    for row in record["contexts"]:
        stock, packed = row["stock"], row["packed"]
        assert stock["ms_per_token"] > 0
        assert row["speedup"] == stock["ms_per_token"] / packed["ms_per_token"]
        # bf16 keys and values of all tokens, in two layers of two heads of 64
        assert stock["cache_bytes"] == (row["context"] + 5) * 2 * 2 * 2 * 64 * 2
        assert packed["cache_bytes"] < stock["cache_bytes"]
        assert packed["backend"] == "torch"
    assert "torch backend" in capsys.readouterr().out


def test_both_caches_hold_the_same_tokens(script: ModuleType) -> None:
    chosen = script.arguments(["--tiny", "--device", "cpu", "--batch", "2", "--dtype", "float32"])
    model = script.make_model(chosen, 1024)
    artifact = script.make_artifact(model)
    stock = script.DynamicCache(config=model.config)
    packed = OscarCache(model, artifact)
    with torch.no_grad():
        script.fill_stock(stock, model, 2, 300)
        script.fill_packed(packed, model, 2, 300)  # all of it lies in the exact windows
        ids = torch.tensor([[5], [7]])
        outputs = [model(ids, past_key_values=cache).logits for cache in (stock, packed)]
    assert packed.get_seq_length() == stock.get_seq_length() == 301
    torch.testing.assert_close(outputs[0], outputs[1])
