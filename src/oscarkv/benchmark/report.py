"""A run's figures: the record that is saved, and the tables that are printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscarkv.benchmark.accuracy import Accuracy
from oscarkv.benchmark.baseline import Bandwidth, Baseline, best
from oscarkv.benchmark.cases import Case
from oscarkv.benchmark.timing import Timing

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "oscarkv-kernels-1"


@dataclass
class CaseResult:
    """One case on one backend. `reason`: why it has no time."""

    case: Case
    status: str = "measured"  # or skipped (memory), or failed
    reason: str = ""
    timing: Timing | None = None
    layers: int = 0  # independent buffer sets that were run in turn
    plan_seconds: float | None = None  # once a step, for all layers together
    baselines: list[Baseline] = field(default_factory=list)
    accuracy: Accuracy | None = None

    @property
    def baseline(self) -> Baseline | None:
        return best(self.baselines)

    @property
    def ratio(self) -> float | None:
        """How many times faster than BF16."""
        if self.timing is None or self.baseline is None or self.baseline.timing is None:
            return None
        return self.baseline.timing.median / self.timing.median

    def to_json(self, bandwidth: Bandwidth) -> dict[str, Any]:
        case, timing, baseline = self.case, self.timing, self.baseline
        floor = case.bytes / bandwidth.read
        figures: dict[str, Any] = {}
        if timing is not None:
            figures = {
                **_microseconds(timing),
                "plan_us": None if self.plan_seconds is None else _rounded(self.plan_seconds * 1e6),
                "gb_per_s": _rounded(case.bytes / timing.median / 1e9),
                "share_of_floor": _rounded(floor / timing.median),
                "ratio": _rounded(self.ratio),
            }
            if case.kind == "prefill":
                figures["tflop_per_s"] = _rounded(case.flops / timing.median / 1e12)
        return {
            "name": case.name,
            "kind": case.kind,
            "query_heads": case.query_heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "batch": len(case.lengths),
            "context": max(case.lengths),
            "lengths": None if len(set(case.lengths)) == 1 else list(case.lengths),
            "new_tokens": case.new,
            "page_size": case.page_size,
            "values_folded": case.folded,
            "status": self.status,
            "reason": self.reason,
            "layers": self.layers,
            "bytes": case.bytes,
            "floor_us": _rounded(floor * 1e6),
            **figures,
            "baseline": None if baseline is None else baseline.name,
            "no_baseline": case.dense,
            "baselines": [_baseline_json(each) for each in self.baselines],
            "accuracy": None if self.accuracy is None else _accuracy_json(self.accuracy),
        }


@dataclass
class Record:
    """A whole run."""

    backend: str
    device: str
    command: str
    date: str
    quick: bool
    machine: dict[str, Any]  # versions, driver, GPU, backends
    bandwidth: Bandwidth
    results: list[CaseResult] = field(default_factory=list)

    @property
    def failed(self) -> list[CaseResult]:
        """Cases that did not run, though there was memory, or gave a wrong result."""
        wrong = (r for r in self.results if r.accuracy is not None and not r.accuracy.good)
        return [*(r for r in self.results if r.status == "failed"), *wrong]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "backend": self.backend,
            "device": self.device,
            "command": self.command,
            "date": self.date,
            "quick": self.quick,
            **self.machine,
            "bandwidth_gb_per_s": {
                name: _rounded(value / 1e9) for name, value in asdict(self.bandwidth).items()
            },
            "cases": [result.to_json(self.bandwidth) for result in self.results],
        }

    def save(self, path: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def _microseconds(timing: Timing) -> dict[str, Any]:
    return {
        "time_us": _rounded(timing.median * 1e6),
        "p10_us": _rounded(timing.low * 1e6),
        "p90_us": _rounded(timing.high * 1e6),
        "repeats": timing.repeats,
        "calls_per_repeat": timing.calls,
        "method": timing.method,
    }


def _baseline_json(baseline: Baseline) -> dict[str, Any]:
    times = {} if baseline.timing is None else _microseconds(baseline.timing)
    return {"name": baseline.name, "whole": baseline.whole, "reason": baseline.reason, **times}


def _accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    value = accuracy.value if math.isfinite(accuracy.value) else None
    return {"what": accuracy.what, "value": value, "limit": accuracy.limit, "good": accuracy.good}


def _rounded(value: float | None) -> float | None:
    """Five digits are more than any clock here is good for."""
    return None if value is None else float(f"{value:.5g}")


# -- tables --------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    copy, read = (
        f"{rate / 1e9:,.0f} GB/s" for rate in (record.bandwidth.copy, record.bandwidth.read)
    )
    return f"{record.device}, {record.backend} backend; memory: copying {copy}, reading {read}"


def tables(record: Record) -> list[Table]:
    """A table for each kernel that was timed, and one of what was not."""
    found = []
    for kind in ("decode", "write", "prefill"):
        results = [r for r in record.results if r.case.kind == kind and r.status == "measured"]
        if results:
            found.append(_table(kind, results, record.bandwidth))
    missing = [r for r in record.results if r.status != "measured"]
    if missing:
        rows = [
            {"case": _text(r.case.name), "why": _text(f"{r.status}: {r.reason}")} for r in missing
        ]
        found.append(_print_rows("not measured", rows))
    return found


def _table(kind: str, results: list[CaseResult], bandwidth: Bandwidth) -> Table:
    rows = [_row(result, bandwidth) for result in results]
    if not any(result.baselines for result in results):
        for row in rows:
            del row["BF16 µs"], row["BF16 kernel"], row["ratio"]
    table = _print_rows(kind, rows)
    table.caption = "\n".join(_text(note) for note in _notes(results))
    return table


def _notes(results: list[CaseResult]) -> list[str]:
    """What a table's figures leave out."""
    plans = [r.plan_seconds * 1e6 for r in results if r.plan_seconds is not None]
    slowest = _figure(max(plans, default=0))
    notes = [f"not included: plan, once a step for all layers together, at most {slowest} µs here"]
    methods = {r.timing.method for r in results if r.timing} - {"CUDA graph"}
    notes += [f"timed by {method}" for method in sorted(methods)]
    for result in results:
        for each in result.baselines:
            if each.timing is not None and not each.whole:
                took = _figure(each.timing.median * 1e6)
                notes.append(f"{result.case.name}: {each.name}, {took} µs")
            elif each.timing is None and result.baseline is None:
                notes.append(f"{result.case.name}: {each.name}: {each.reason}")
    return notes


def _row(result: CaseResult, bandwidth: Bandwidth) -> dict[str, str]:
    case, timing, baseline = result.case, result.timing, result.baseline
    assert timing is not None
    dense = baseline.timing.median if baseline is not None and baseline.timing else None
    row = {
        "case": _text(case.name.removeprefix(f"{case.kind} ")),
        "µs": _figure(timing.median * 1e6),
        "p10 - p90": f"{_figure(timing.low * 1e6)} - {_figure(timing.high * 1e6)}",
        "BF16 µs": "-" if dense is None else _figure(dense * 1e6),
        "BF16 kernel": "-" if baseline is None else baseline.name,
        "ratio": "-" if result.ratio is None else f"{result.ratio:.2f}x",
    }
    if case.kind == "prefill":  # bound by arithmetic
        row["TFLOP/s"] = _figure(case.flops / timing.median / 1e12)
    else:
        floor = case.bytes / bandwidth.read
        row["MB"] = _figure(case.bytes / 1e6)
        row["GB/s"] = _figure(case.bytes / timing.median / 1e9)
        row["floor µs"] = _figure(floor * 1e6)
        row["of floor"] = f"{floor / timing.median:.0%}"
    row["error"] = _error(result.accuracy)
    return row


def _error(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return "-"
    shown = f"{accuracy.value:.1e}"
    return shown if accuracy.good else f"[red]{shown}: wrong[/red]"


def _figure(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def _text(value: str) -> str:
    from rich.markup import escape

    return escape(value)


def _print_rows(title: str, rows: list[dict[str, str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for heading in rows[0]:
        words = heading in ("case", "why", "BF16 kernel")
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "why")
    for row in rows:
        table.add_row(*row.values())
    return table
