"""`oscarkv bench serving` around a stand-in for the engine, in real child processes."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_vllm

from oscarkv import Recipe
from oscarkv.artifact import load_artifact
from oscarkv.benchmark import geometry, serving_report
from oscarkv.benchmark.serving import Run, ServingRecord, bench_serving
from oscarkv.benchmark.serving_plan import EnginePlan, Load, Shape, parse_length
from oscarkv.errors import OscarError

ABOUT = {"model": "fake", "device": "none"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages"
    fake_vllm.install(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


def plan(name: str = "CPU_ATTN", **changes: object) -> EnginePlan:
    made = EnginePlan(
        name=name,
        model="nowhere",
        engine={},
        prefill="computed",
        vocabulary=50,
        shapes=[Shape(4, 100)],
        load=Load(requests=10, context=60, new_tokens=5),
        steps=6,
        repeats=2,
    )
    made = dataclasses.replace(made, **changes)
    made.engine.setdefault("max_model_len", made.longest)
    return made


def bench(*plans: EnginePlan, timeout: float = 60) -> tuple[ServingRecord, list[dict], list[str]]:
    """The record, its states as they were saved, and what was said."""
    record, saved, said = ServingRecord(dict(ABOUT)), [], []
    bench_serving(
        plans,
        record,
        timeout=timeout,
        save=lambda: saved.append(json.loads(json.dumps(record.to_json()))),
        say=said.append,
    )
    return record, saved, said


def test_figures(engine: Path) -> None:
    record, saved, said = bench(plan(), plan("oscarkv", prefill="real", prompts=[40]))
    stock, mine = record.runs
    assert [run.status for run in record.runs] == ["measured"] * 2
    assert stock.kv_tokens == 10000
    (row,) = stock.steps
    assert (row["batch"], row["context"], row["contexts"]) == (4, 100, "computed")
    assert 0.001 <= row["seconds"] < 0.1
    assert row["tokens_per_s"] == pytest.approx(4 / row["seconds"])
    assert len(row["all"]) == 2
    assert mine.steps[0]["contexts"] == "real"
    assert [entry["context"] for entry in mine.first_token] == [40]
    (load,) = stock.loads
    assert load["tokens"] == 50
    assert load["most_at_once"] == 8
    assert load["preemptions"] == 5  # a step, while some wait
    assert load["between_tokens_s"]["p50"] >= 0.001
    # Two requests waited for a place: their first token came five steps later.
    assert load["first_token_s"]["p99"] > load["first_token_s"]["p50"]
    assert any("step at 4x100" in line for line in said)
    # A figure is on disk before the next one is there.
    assert [len(state["runs"][0]["steps"]) for state in saved[:3]] == [0, 1, 1]


def test_what_does_not_fit_is_named(engine: Path) -> None:
    record, _, _ = bench(plan(shapes=[Shape(200, 100), Shape(10, 100), Shape(2, 100)]))
    first, second, third = record.runs[0].steps
    assert first["status"] == "skipped"
    assert "the cache holds 10,000" in first["reason"]
    assert "10 requests of 100 never ran at once" in second["reason"]
    assert third["status"] == "measured"


@pytest.mark.parametrize(
    ("fault", "timeout", "reason"),
    [
        ("raises", 60, "ValueError: no such thing"),
        ("dies", 60, "ended with 7: TerribleError: out of luck"),
        ("hangs", 8, "stopped after 8 s"),  # in which a busy machine still starts the other one
    ],
)
def test_a_failing_engine_costs_only_itself(
    engine: Path, fault: str, timeout: int, reason: str
) -> None:
    broken = plan("TRITON_ATTN", engine={"fault": fault})
    record, saved, _ = bench(broken, plan(), timeout=timeout)
    assert record.runs[0].status == "failed"
    assert reason in record.runs[0].reason
    assert any("loading nowhere" in line for line in record.runs[0].log)
    assert record.runs[1].status == "measured"
    assert saved[-1]["runs"][0]["reason"] == record.runs[0].reason
    assert record.failed == [record.runs[0]]


def test_a_killed_benchmark_takes_its_engine_along(engine: Path) -> None:
    code = (
        "from test_serving import *; import os, threading\n"
        "threading.Timer(2, lambda: os._exit(3)).start()\n"
        "bench(plan(engine={'fault': 'hangs'}))"
    )
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *sys.path])
    child = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    assert child.returncode == 3
    for _ in range(50):
        lines = [process.cmdline() for process in psutil.process_iter() if is_worker(process)]
        if not lines:
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {lines}")


def is_worker(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return "oscarkv.benchmark.serving_worker" in words and "hangs" in words[-1]
    except psutil.Error:
        return False


def test_stock_attention_is_not_measured_as_ours(engine: Path) -> None:
    fake_vllm.install(engine, plugin=False)
    record, _, _ = bench(plan("oscarkv"))
    assert record.runs[0].status == "failed"
    assert "did not load oscarkv's plugin" in record.runs[0].reason


def test_real_contexts_beside_computed_ones(engine: Path) -> None:
    record, _, _ = bench(plan(prefill="both", prompts=[30]))
    (run,) = record.runs
    computed, real = run.loads
    assert (computed["contexts"], real["contexts"]) == ("computed", "real")
    assert real["seconds"] > 2 * computed["seconds"]  # the stand-in takes longer to read
    assert run.steps[0]["contexts"] == "computed"
    assert [entry["context"] for entry in run.first_token] == [30]


def test_saved_whole(tmp_path: Path) -> None:
    run = Run("oscarkv", "measured", started={"kv_tokens": 5})
    record = ServingRecord(dict(ABOUT), [run])
    record.save(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["format"] == "oscarkv-serving-1"
    assert data["runs"][0]["kv_tokens"] == 5
    assert ServingRecord.from_json(data) == record
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_tables_and_plot(engine: Path, tmp_path: Path) -> None:
    from rich.console import Console

    real = plan("oscarkv", prefill="real", prompts=[40])
    record, _, _ = bench(plan(), real, plan("TRITON_ATTN", engine={"fault": "raises"}))
    console = Console(width=200, record=True, file=io.StringIO())
    for table in serving_report.tables(record):
        console.print(table)
    text = console.export_text()
    for part in ("oscarkv holds 1.00x", "4 x 100", "against CPU_ATTN", "10 x 60 + 5",
                 "failed: ValueError", "time to first token"):  # fmt: skip
        assert part in text
    pytest.importorskip("matplotlib")
    serving_report.plot(record, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "4 x 100" in drawn
    assert "oscarkv" in drawn


def test_plans() -> None:
    assert Shape.parse("32x16k") == Shape(32, 16384)
    assert Shape.parse(" 1 x 500") == Shape(1, 500)
    for bad in ("32", "x5", "0x5", "5x0", "ax5"):
        with pytest.raises(OscarError, match="write for instance"):
            Shape.parse(bad)
    with pytest.raises(OscarError, match="is no length"):
        parse_length("many")
    made = plan()
    assert EnginePlan.from_json(made.to_json()) == made
    computed, real = plan(), plan(prefill="real", engine={"max_num_batched_tokens": 50})
    # Four prompts in two chunks each, and a step between: what the first one makes meanwhile.
    assert real.room(Shape(4, 100)) - computed.room(Shape(4, 100)) == 4 * 3


@pytest.mark.parametrize("name", sorted(geometry.GEOMETRIES))
def test_geometries(name: str) -> None:
    config = geometry.geometry(name)
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    with pytest.raises(OscarError, match="known: qwen3-4b"):
        geometry.geometry(f"{name}!")


def test_a_made_model_is_one(tmp_path: Path) -> None:
    from oscarkv.integrations.serving.fit import geometry_of
    from oscarkv.integrations.transformers.models import load_config

    model, file = geometry.make_model("tiny", tmp_path, Recipe.named("uniform"))
    artifact = load_artifact(file)  # checks inverses
    artifact.model.require_match(geometry_of(load_config(model), str(model)).identity)
    assert len(artifact.layers) == 2
    assert not artifact.layers[0].key.equal(artifact.layers[1].key)
