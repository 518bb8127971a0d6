"""Write the kernels' figures into the docs: python scripts/kernel_table.py JSON

JSON is what `oscarkv bench kernels --json` wrote. Everything between the two markers in
docs/benchmarks.md is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- kernel table: scripts/kernel_table.py writes it -->"
END = "<!-- end of kernel table -->"
NONE = "–"
#: What scripts/plot_kernels.py draws of the same file.
PLOTS = """![decode against BF16](pictures/kernels-decode.svg)

![bytes a second](pictures/kernels-bandwidth.svg)"""


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def markdown(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def baseline_us(case: dict[str, Any]) -> float | None:
    return next((b["time_us"] for b in case["baselines"] if b["name"] == case["baseline"]), None)


def row(case: dict[str, Any]) -> dict[str, str]:
    dense, accuracy = baseline_us(case), case["accuracy"]
    cells = {
        case["kind"]: case["name"].removeprefix(f"{case['kind']} "),
        "µs": figure(case["time_us"]),
        "BF16 µs": NONE if dense is None else figure(dense),
        "BF16 kernel": case["baseline"] or NONE,
        "times faster": NONE if case["ratio"] is None else f"**{case['ratio']:.2f}**",
        "GB/s": figure(case["gb_per_s"]),
        "of the floor": f"{case['share_of_floor']:.0%}",
    }
    if case["kind"] == "prefill":  # bound by arithmetic
        del cells["GB/s"], cells["of the floor"]
        cells["TFLOP/s"] = figure(case["tflop_per_s"])
    value = accuracy["value"] if accuracy else None
    cells["error"] = NONE if value is None else f"{value:.1e}"
    return cells


def table(cases: list[dict[str, Any]]) -> str:
    rows = [row(case) for case in cases]
    if not any(case["baselines"] for case in cases):
        for cells in rows:
            del cells["BF16 µs"], cells["BF16 kernel"], cells["times faster"]
    return markdown(rows)


def notes(record: dict[str, Any]) -> list[str]:
    """What the tables leave out."""
    plans = [case["plan_us"] for case in record["cases"] if case.get("plan_us") is not None]
    found = [f"`plan`, once a step: at most {figure(max(plans))} µs"] if plans else []
    for case in record["cases"]:
        name = f"`{case['name']}`"
        if case["status"] != "measured":
            found.append(f"{name}: {case['status']}, {case['reason']}")
            continue
        if case["accuracy"] and not case["accuracy"]["good"]:
            found.append(f"{name}: **wrong result**, {case['accuracy']['what']} above the limit")
        if case["method"] != "CUDA graph":
            found.append(f"{name}: timed by {case['method']}")
        if case["no_baseline"] and case["kind"] == "decode":
            found.append(f"{name}: no BF16 time; {case['no_baseline']}")
        for each in case["baselines"]:
            if "time_us" not in each:
                found.append(f"{name}: {each['name']} does not run: {each['reason']}")
            elif not each["whole"]:
                found.append(f"{name}: {each['name']}: {figure(each['time_us'])} µs")
    return found


def machine(record: dict[str, Any]) -> str:
    versions = (f"{name} {v}" for name, v in record.get("versions", {}).items() if v)
    driver = f"driver {record['driver']}" if record.get("driver") else ""
    facts = ", ".join(filter(None, (record["device"], driver, *versions)))
    rates = record["bandwidth_gb_per_s"]
    return (
        f"{facts}; {record['date'][:10]}; backend `{record['backend']}`. Memory, measured in the "
        f"same run: reading {figure(rates['read'])} GB/s (the floor), copying "
        f"{figure(rates['copy'])} GB/s.\n\n    {record['command']}"
    )


def section(record: dict[str, Any]) -> str:
    parts = [machine(record)]
    measured = [case for case in record["cases"] if case["status"] == "measured"]
    for kind in ("decode", "write", "prefill"):
        if cases := [case for case in measured if case["kind"] == kind]:
            parts.append(table(cases))
    if listed := notes(record):
        parts.append("\n".join(f"- {note}" for note in listed))
    return "\n\n".join([*parts, PLOTS])


def replace(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what `oscarkv bench kernels --json` wrote")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the markers")
    arguments = parser.parse_args()
    record = json.loads(arguments.json.read_text(encoding="utf-8"))
    page = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(replace(page, section(record)), encoding="utf-8")


if __name__ == "__main__":
    main()
