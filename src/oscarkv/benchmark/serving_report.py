"""Tables and the plot of a serving benchmark, from the record that is saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscarkv.benchmark.serving import MEASURED, Run, ServingRecord
from oscarkv.benchmark.serving_plan import OURS
from oscarkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {OURS: "#2f6f9f"}
_GREYS = ("#b5b5b5", "#8a8a8a", "#d5d5d5")


def shapes(record: ServingRecord) -> list[tuple[int, int]]:
    """Batch and context of all steps, in the order they were asked for."""
    rows = (row for run in record.runs for row in run.steps)
    return list(dict.fromkeys((row["batch"], row["context"]) for row in rows))


def ours(record: ServingRecord) -> Run | None:
    return next((run for run in record.runs if run.name == OURS), None)


def baselines(record: ServingRecord) -> list[Run]:
    return [run for run in record.runs if run.name != OURS]


# -- tables ----------------------------------------------------------------------------------------


def tables(record: ServingRecord) -> list[Table]:
    made = [_capacity(record)]
    if shapes(record):
        made.append(_steps(record))
    if any(run.first_token for run in record.runs):
        made.append(_first_tokens(record))
    if any(run.loads for run in record.runs):
        made.append(_loads(record))
    return made


def _capacity(record: ServingRecord) -> Table:
    mine = ours(record)
    rows = []
    for run in record.runs:
        known = run.started
        gain = ""
        if run is not mine and mine is not None and mine.kv_tokens and run.kv_tokens:
            gain = f"oscarkv holds {mine.kv_tokens / run.kv_tokens:.2f}x"
        rows.append(
            {
                "engine": run.name,
                "cache, tokens": _figure(run.kv_tokens, ",d"),
                "requests of the longest length": _figure(known.get("concurrency"), ",.1f"),
                "start, s": _figure(known.get("seconds"), ".0f"),
                "": gain if run.status != "failed" else f"{gain} failed: {run.reason}".strip(),
            }
        )
    return _table("capacity", rows)


def _steps(record: ServingRecord) -> Table:
    rows = []
    mine = ours(record)
    for batch, context in shapes(record):
        row = {"batch x context": f"{batch} x {context:,}"}
        own = None if mine is None else mine.step_seconds(batch, context)
        for run in record.runs:
            took = run.step_seconds(batch, context)
            row[f"{run.name}, ms"] = "-" if took is None else f"{took * 1e3:.4g}"
        row["oscarkv, tokens/s"] = "-" if own is None else f"{batch / own:,.0f}"
        for run in baselines(record):
            took = run.step_seconds(batch, context)
            known = own is not None and took is not None
            row[f"against {run.name}"] = f"{took / own:.2f}x" if known else "-"  # type: ignore[operator]
        rows.append(row)
    return _table("decode step", rows)


def _first_tokens(record: ServingRecord) -> Table:
    lengths = dict.fromkeys(row["context"] for run in record.runs for row in run.first_token)
    rows = []
    for length in lengths:
        row = {"prompt": f"{length:,}"}
        for run in record.runs:
            found = [r for r in run.first_token if r["context"] == length]
            took = found[0].get("seconds") if found else None
            row[f"{run.name}, s"] = _figure(took, ".4g")
            row[f"{run.name}, tokens/s"] = "-" if not took else f"{length / took:,.0f}"
        rows.append(row)
    return _table("time to first token, one request", rows)


def _loads(record: ServingRecord) -> Table:
    rows = []
    for run in record.runs:
        for load in run.loads:
            first, between = load["first_token_s"] or {}, load["between_tokens_s"] or {}
            rows.append(
                {
                    "engine": run.name,
                    "requests": f"{load['requests']} x {load['context']:,} + {load['new_tokens']}",
                    "contexts": load["contexts"],
                    "tokens/s": f"{load['tokens_per_s']:,.1f}",
                    "requests/s": f"{load['requests_per_s']:.4g}",
                    "at once": str(load["most_at_once"]),
                    "preempted": _figure(load["preemptions"], "d"),
                    "first token, s: p50 / p99": _pair(first),
                    "between tokens, ms: p50 / p99": _pair(between, 1e3),
                }
            )
    return _table("all requests at once", rows)


def _pair(values: dict[str, float], unit: float = 1.0) -> str:
    return f"{values['p50'] * unit:.4g} / {values['p99'] * unit:.4g}" if values else "-"


def _figure(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index and heading else "left")
    for row in rows:
        table.add_row(*(escape(value) for value in row.values()))
    return table


# -- plot ------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'the plot needs matplotlib: pip install "oscarkv[demo]"'
        ) from None


def plot(record: ServingRecord, path: Path) -> None:
    """Steps, capacity and throughput side by side, one colour an engine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "oscarkv", "svg.fonttype": "none"})
    runs = [run for run in record.runs if run.started]
    greys = iter(_GREYS * len(runs))
    colours = {run.name: _COLOURS.get(run.name) or next(greys) for run in runs}
    figure, (steps, capacity, load) = plt.subplots(
        1, 3, figsize=(13, 4), width_ratios=[2.2, 1, 1], layout="constrained"
    )
    for axes in (steps, capacity, load):
        axes.spines[["top", "right"]].set_visible(False)
    _plot_steps(steps, record, runs, colours)
    _plot_bars(capacity, {run.name: (run.kv_tokens or 0) / 1e3 for run in runs}, colours)
    capacity.set_title("KV cache, thousands of tokens", fontsize=11)
    rates = {run.name: run.loads[0]["tokens_per_s"] for run in runs if run.loads}
    _plot_bars(load, rates, colours)
    load.set_title("all requests at once, tokens/s", fontsize=11)
    figure.suptitle(f"{record.about['model']}, {record.about['device']}", fontsize=12)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)
    plt.close(figure)


def _plot_steps(axes: Any, record: ServingRecord, runs: list[Run], colours: dict[str, str]) -> None:
    asked = shapes(record)
    width = 0.8 / max(1, len(runs))
    for index, run in enumerate(runs):
        times = [run.step_seconds(*shape) for shape in asked]
        places = [at + (index - (len(runs) - 1) / 2) * width for at in range(len(asked))]
        known = [(x, took * 1e3) for x, took in zip(places, times, strict=True) if took is not None]
        axes.bar(
            [x for x, _ in known],
            [took for _, took in known],
            width,
            color=colours[run.name],
            label=run.name,
        )
    axes.set_xticks(range(len(asked)), [f"{batch} x {context:,}" for batch, context in asked])
    axes.tick_params(axis="x", labelrotation=20)
    axes.set_title("decode step, ms (batch x context; nothing: does not fit)", fontsize=11)
    axes.legend(frameon=False)


def _plot_bars(axes: Any, values: dict[str, float], colours: dict[str, str]) -> None:
    names = list(values)
    bars = axes.bar(names, list(values.values()), color=[colours[name] for name in names])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    axes.tick_params(axis="x", labelrotation=20)


def headline(record: ServingRecord) -> str:
    good = sum(run.status == MEASURED for run in record.runs)
    return (
        f"{record.about['model']} on {record.about['device']}: {good} of {len(record.runs)} engines"
    )
