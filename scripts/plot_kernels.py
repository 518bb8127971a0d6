"""Draw the kernels' speed from `oscarkv bench kernels --json`: python scripts/plot_kernels.py JSON

Writes docs/pictures/kernels-decode.svg and docs/pictures/kernels-bandwidth.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
OURS, FLOOR, OTHERS = "#2f6f9f", "#e3a857", "#b5b5b5"
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "oscarkv", "svg.fonttype": "none"})


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def measured(record: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """Cases from the last to the first, since bars are drawn upwards."""
    return [c for c in record["cases"] if c["kind"] in kinds and c["status"] == "measured"][::-1]


def baseline_us(case: dict[str, Any]) -> float:
    (time,) = (b["time_us"] for b in case["baselines"] if b["name"] == case["baseline"])
    return float(time)


def bars(count: int) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.34 * count))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def decode(record: dict[str, Any], path: Path) -> None:
    """How many times faster than BF16, and how many the memory would allow."""
    cases = [case for case in measured(record, "decode") if case["ratio"]]
    figure, axes = bars(len(cases))
    rows = range(len(cases))
    ratios = [case["ratio"] for case in cases]
    floors = [baseline_us(case) / case["floor_us"] for case in cases]
    axes.barh(rows, ratios, color=OURS, height=0.62, label=f"{record['backend']} backend")
    axes.scatter(floors, rows, marker="|", s=160, linewidths=2.5, color=FLOOR,
                 label="if only memory took time", zorder=3)  # fmt: skip
    for row, ratio in zip(rows, ratios, strict=True):
        axes.text(ratio - 0.08, row, f"{ratio:.1f}", va="center", ha="right", color="white",
                  fontsize=9)  # fmt: skip
    axes.axvline(1, color=OTHERS, linestyle="--", linewidth=1)
    axes.set_yticks(rows, [case["name"].removeprefix("decode ") for case in cases])
    axes.set_ylim(-0.6, len(cases) - 0.4)
    axes.set_xlim(0)
    axes.set_xlabel(f"times faster than the best BF16 kernel, {record['device']}")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    save(figure, path)


def bandwidth(record: dict[str, Any], path: Path) -> None:
    """Bytes that had to move, over the time it took."""
    cases = measured(record, "decode", "write")
    figure, axes = bars(len(cases))
    rows = range(len(cases))
    rates = [case["gb_per_s"] / 1e3 for case in cases]
    axes.barh(rows, rates, color=OURS, height=0.62)
    for row, rate in zip(rows, rates, strict=True):
        axes.text(rate, row, f" {rate:.2f}", va="center", fontsize=9)
    read = record["bandwidth_gb_per_s"]["read"] / 1e3
    axes.axvline(read, color=FLOOR, linewidth=2)
    axes.text(read, len(cases) - 0.35, f"reading alone: {read:.2f}", ha="right", color="#777777",
              fontsize=9)  # fmt: skip
    axes.set_yticks(rows, [case["name"] for case in cases])
    axes.set_ylim(-0.6, len(cases) - 0.4)
    axes.set_xlim(0, read * 1.08)
    axes.set_xlabel(f"TB/s of bytes that had to move, {record['device']}")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what `oscarkv bench kernels --json` wrote")
    parser.add_argument("--output", type=Path, default=DOCS / "pictures", help="a directory")
    arguments = parser.parse_args()
    record = json.loads(arguments.json.read_text(encoding="utf-8"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    decode(record, arguments.output / "kernels-decode.svg")
    bandwidth(record, arguments.output / "kernels-bandwidth.svg")


if __name__ == "__main__":
    main()
