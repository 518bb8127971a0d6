"""Running cases: what is recorded, also of those that go wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oscarkv.benchmark import baseline, report, timing
from oscarkv.benchmark.baseline import Bandwidth, Baseline
from oscarkv.benchmark.cases import Case, gpu_cases
from oscarkv.benchmark.report import CaseResult, Record
from oscarkv.benchmark.run import run_case
from oscarkv.benchmark.timing import Timing, measure
from oscarkv.kernels.torch_backend import TorchBackend

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DECODE = Case("decode", (4, 2, 64), (400, 400))


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.01)


def took(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 20, 1, "CUDA graph")


def test_measure_runs_calls_in_turn() -> None:
    order: list[int] = []
    found = measure([lambda: order.append(0), lambda: order.append(1)], CPU)
    assert order[:4] == [0, 1, 0, 1]
    assert found.calls == 2
    assert found.low <= found.median <= found.high
    assert found.method == "wall clock"


def test_a_case_is_measured() -> None:
    result = run_case(DECODE, TorchBackend(), CPU)
    assert result.status == "measured"
    assert result.timing is not None
    assert result.ratio is not None
    assert result.ratio > 0
    assert result.accuracy is not None
    assert result.accuracy.good
    assert result.baseline is not None
    assert "SDPA" in result.baseline.name
    assert run_case(DECODE, TorchBackend(), CPU, dense=False).baselines == []


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "skipped", "out of memory"),
        (ValueError("no such tile"), "failed", "ValueError: no such tile"),
    ],
)
def test_what_goes_wrong_is_recorded(raised: Exception, status: str, reason: str) -> None:
    class Broken(TorchBackend):
        def decode(self, q, layer, out) -> None:
            raise raised

    result = run_case(DECODE, Broken(), CPU)
    assert (result.status, result.reason) == (status, reason)
    record = Record("torch", "CPU", "", "", False, {}, Bandwidth(1e9, 2e9), [result])
    assert bool(record.failed) == (status == "failed")
    written = record.to_json()["cases"][0]
    assert (written["status"], written["reason"]) == (status, reason)
    assert "time_us" not in written
    assert report.tables(record)[0].title == "not measured"


def test_baselines_that_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(case: Case, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(baseline, "_dense", full)
    result = run_case(DECODE, TorchBackend(), CPU)
    assert result.status == "measured"
    assert result.baseline is None
    assert "out of memory" in result.baselines[0].reason
    written = result.to_json(Bandwidth(1e9, 1e9))
    assert written["baseline"] is None
    assert written["ratio"] is None


def test_the_fastest_whole_baseline_counts() -> None:
    result = CaseResult(
        DECODE,
        timing=took(1e-5),
        baselines=[
            Baseline("slow", timing=took(8e-5)),
            Baseline("part", whole=False, timing=took(1e-5)),
            Baseline("broken", reason="no kernel"),
            Baseline("fast", timing=took(5e-5)),
        ],
    )
    assert result.baseline is not None
    assert result.baseline.name == "fast"
    assert result.ratio == pytest.approx(5)


def test_the_ways_to_attend_agree() -> None:
    """Masks, heads as rows: all give the same numbers (the CPU stands in for the kernels)."""
    one, several = DECODE, Case("decode", (4, 2, 64), (30, 30), 4)
    q, k, v = baseline._dense(one, CPU)
    expected = baseline._sdpa(None, q, k, v)
    rows = baseline._heads_as_rows(None, q, k, v)  # type: ignore[arg-type]
    torch.testing.assert_close(rows.view_as(expected), expected)
    q, k, v = baseline._dense(several, CPU)
    ((_, whole, attend),) = baseline._ways(several, CPU)
    assert whole
    last = baseline._sdpa(None, q[:, :, 3:], k, v)
    found = attend(q, k, v)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found[:, :, 3:], last)


def test_every_gpu_case_has_ways_to_compare() -> None:
    gpu = torch.device("cuda", 0)
    for case in gpu_cases():
        names = [name for name, whole, _ in baseline._ways(case, gpu) if whole]
        if not case.dense:
            assert any("flash" in name for name in names)
            expected = case.kind == "decode" or case.new == case.lengths[0]
            assert any("cuDNN" in name for name in names) == expected


@pytest.fixture
def full_record() -> Record:
    """The whole table with made-up times."""
    record = Record("cuda", "Some GPU", "oscarkv bench kernels", "2026-11-15", False,
                    {"versions": {}}, Bandwidth(4e12, 4.5e12))  # fmt: skip
    for case in gpu_cases():
        compared = [] if case.dense else [Baseline("cuDNN SDPA", timing=took(2e-3))]
        result = CaseResult(case, timing=took(4e-4), layers=1, plan_seconds=1e-5)
        result.baselines = compared
        record.results.append(result)
    return record


def test_tables_show_every_case(full_record: Record) -> None:
    shown = report.tables(full_record)
    assert [table.title for table in shown] == ["decode", "write", "prefill"]
    assert sum(table.row_count for table in shown) == len(gpu_cases())
    assert [str(c.header) for c in shown[0].columns][:6] == [
        "case", "µs", "p10 - p90", "BF16 µs", "BF16 kernel", "ratio",
    ]  # fmt: skip
    assert "ratio" not in [c.header for c in shown[1].columns]
    assert "TFLOP/s" in [c.header for c in shown[2].columns]


def test_plots_are_drawn_from_the_record(full_record: Record, tmp_path: Path) -> None:
    full_record.save(tmp_path / "kernels.json")
    assert json.loads((tmp_path / "kernels.json").read_text())["format"] == report.FORMAT
    command = [sys.executable, ROOT / "scripts" / "plot_kernels.py", tmp_path / "kernels.json"]
    subprocess.run([*command, "--output", tmp_path], check=True)
    for name in ("kernels-decode.svg", "kernels-bandwidth.svg"):
        drawn = (tmp_path / name).read_text()
        assert "<svg" in drawn
        assert "32/8/128 32x32768" in drawn
