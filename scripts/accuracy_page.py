"""Write accuracy figures into the docs: python scripts/accuracy_page.py JSON ...

Each JSON is what scripts/accuracy.py wrote for one model. Everything between the two markers in
docs/accuracy.md is replaced, and the pictures docs/pictures/accuracy-*.svg are drawn.
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
BEGIN = "<!-- accuracy tables: scripts/accuracy_page.py writes them -->"
END = "<!-- end of accuracy tables -->"
NONE = "–"
COLLAPSED = 0.5
OURS, OTHERS, PUBLISHED = "#2f6f9f", "#b5b5b5", "#e3a857"
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "oscarkv", "svg.fonttype": "none"})

#: Section: title, what it shows.
SECTIONS = {
    "methods": (
        "Every method, the same windows",
        "Sink 64 and recent 256 for all. `paired` is the difference of KL from the first, window "
        "by window, with its standard error. In *italics* if rounded on dense tensors; of the "
        "others the packed cache itself is measured.",
    ),
    "alone": (
        "Without our windows",
        "Only the tokens exact that the method's own paper keeps, or none.",
    ),
    "ablation": (
        "The paper's own ablation",
        "OSCAR's rotations at groups of half a head, where P is not a no-op, as published and with "
        "means removed first. `key target` takes U from K and V themselves.",
    ),
    "robustness": (
        "Calibration text",
        "`uniform`, fitted to other text and to less of it; measured on the same windows. "
        "*Alone*: without the general text.",
    ),
    "tuned": (
        "Bits by layer",
        "`oscarkv tune`: the bits that `compact` leaves, given to the layers that need them.",
    ),
    "parts": ("What each part buys", "One thing changed at a time."),
    "windows": ("Windows", "The transforms of `uniform`, with other windows."),
    "positions": (
        "Positions",
        "What statistics are averaged over, at the calibration's own length.",
    ),
}


def markdown(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float | None, form: str = ".4f") -> str:
    return NONE if value is None else format(value, form)


def kl(score: dict[str, Any], value: str = "kl") -> str:
    error = score.get(f"{value}_se")
    sign = "+" if value == "kl_difference" else ""
    return number(score[value], f"{sign}.4f") + ("" if error is None else f" ± {error:.4f}")


def table(found: dict[str, Any], paired: bool) -> str:
    rows = []
    first = found["paired_with"]
    for name, score in found["recipes"].items():
        shown = f"*{name}*" if score["simulated"] and paired else name
        cells = {
            "": shown,
            "bits at 128K": f"{score['bits_128k']:.3f}",
            "KL": kl(score),
            f"paired with {first}": NONE if name == first else kl(score, "kl_difference"),
            "top-1": f"{score['top1']:.1%}",
            "perplexity": f"× {score['ppl_ratio']:.3f}"
            + (": collapses" if score["top1"] < COLLAPSED else ""),
        }
        rows.append(cells)
    return markdown(rows)


def by_length(record: dict[str, Any], prefix: str) -> str:
    """KL of each recipe at each length."""
    found = {k: v for k, v in record.items() if k.startswith(prefix)}
    if not found:
        return ""
    names = list(next(iter(found.values()))["recipes"])
    rows = []
    for name in names:
        bits = next(iter(found.values()))["recipes"][name]["bits_128k"]
        cells = {"": name, "bits at 128K": f"{bits:.3f}"}
        for section in found.values():
            score = section["recipes"].get(name)
            heading = f"{section['length']:,} x {section['windows']}"
            cells[heading] = NONE if score is None else kl(score)
        rows.append(cells)
    return markdown(rows)


def split(found: dict[str, Any]) -> str:
    parts = found["parts"]
    whole = {p["sides"]: p["kl"] for p in parts if p["layer"] is None}
    layers: dict[int, dict[str, float]] = {}
    for part in parts:
        if part["layer"] is not None and part["head"] is None:
            layers.setdefault(part["layer"], {})[part["sides"]] = part["kl"]
    worst = sorted(layers, key=lambda i: -sum(layers[i].values()))[:6]
    total = sum(sum(sides.values()) for sides in layers.values())
    listed = ", ".join(f"{i} ({sum(layers[i].values()) / total:.0%})" for i in worst)
    return (
        f"Keys alone {whole['keys']:.4f}, values alone {whole['values']:.4f}, both "
        f"{whole['keys+values']:.4f}. One layer at a time, the layers that cost most: {listed}."
    )


def measured_later(record: dict[str, Any]) -> list[str]:
    """Rows of another machine than the record's."""
    found: dict[str, list[str]] = {}
    for section in record.values():
        for name, score in section.get("recipes", {}).items() if "recipes" in section else ():
            if on := score.get("measured_on"):
                names = found.setdefault(f"{on['device']}, torch {on['torch']}", [])
                if name not in names:
                    names.append(name)
    return [f"Of {machine}: {', '.join(names)}" for machine, names in found.items()]


def model_page(record: dict[str, Any], stem: str) -> str:
    about = record["about"]
    out = [f"### {about['model']}", ""]
    out += [f"{about['device']}, torch {about['torch']}, {about['dtype']}, plan `{about['plan']}`."]
    out += [f"{later}." for later in measured_later(record)]
    if "methods" in record:
        ppl = record["methods"]["perplexity"]
        out += [f"Perplexity with the full-precision cache: {ppl:.2f}.", ""]
        out += [f"![accuracy against bits](pictures/{stem}-bits.svg)", ""]
    if lengths := by_length(record, "length-"):
        out += ["", "#### By context length", "", "KL; the same calibration.", "", lengths, ""]
    if lengths or "methods" in record:
        out += [f"![KL by position](pictures/{stem}-positions.svg)", ""]
    for name, (title, text) in SECTIONS.items():
        if name not in record:
            continue
        found = record[name]
        windows = "1 window" if found["windows"] == 1 else f"{found['windows']} windows"
        size = f"{windows} of {found['length']:,} tokens."
        out += [f"#### {title}", "", f"{text} {size}", "", table(found, name == "methods"), ""]
        if name == "positions" and (longer := by_length(record, "positions-")):
            out += [longer, ""]
    if "split" in record:
        out += ["#### Where the error is", "", split(record["split"]), ""]
        out += [f"![by layer](pictures/{stem}-layers.svg)", ""]
    return "\n".join(out)


# -- pictures ------------------------------------------------------------------------------------


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def axes_of(size: tuple[float, float]) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=size)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def colour(name: str) -> str:
    if name.startswith(("balanced", "uniform", "compact", "precise", "retrieval")):
        return OURS
    return PUBLISHED if name.startswith("paper") else OTHERS


def draw_bits(record: dict[str, Any], path: Path) -> None:
    figure, axes = axes_of((9, 4.6))
    found = {n: s for n, s in record["methods"]["recipes"].items() if s["bits_128k"] < 8}
    for name, score in found.items():
        axes.scatter(score["bits_128k"], score["kl"], s=60, color=colour(name), zorder=3)
        axes.annotate(
            name,
            (score["bits_128k"], score["kl"]),
            xytext=(7, 3),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.set_xlim(2, max(s["bits_128k"] for s in found.values()) + 0.5)
    axes.set_xlabel("bits an element at 128K, everything included")
    axes.set_ylabel("KL from the full-precision cache")
    save(figure, path)


def draw_positions(record: dict[str, Any], path: Path) -> None:
    """KL by position, at the longest length measured."""
    lengths = [k for k in record if k.startswith("length-")]
    found = record[max(lengths, key=lambda k: record[k]["length"])] if lengths else None
    found = found or record["methods"]
    figure, axes = axes_of((9, 4))
    styles = {
        "balanced": "-",
        "uniform": (0, (5, 1)),
        "compact": "--",
        "precise": "-.",
        "retrieval": ":",
    }
    for name, score in found["recipes"].items():
        if score["bits_128k"] > 8 or score["top1"] < COLLAPSED:
            continue
        middles = [(p["start"] * p["stop"]) ** 0.5 for p in score["kl_by_position"]]
        values = [p["kl"] for p in score["kl_by_position"]]
        line, marker = styles.get(name, ":"), "o" if name in styles else "."
        axes.plot(middles, values, linestyle=line, marker=marker, color=colour(name), label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"position of the query, in windows of {found['length']:,} tokens")
    axes.set_ylabel("KL")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


def draw_layers(record: dict[str, Any], path: Path) -> None:
    parts = [p for p in record["split"]["parts"] if p["layer"] is not None and p["head"] is None]
    layers = sorted({p["layer"] for p in parts})
    sides = {s: {p["layer"]: p["kl"] for p in parts if p["sides"] == s} for s in ("keys", "values")}
    figure, axes = axes_of((9, 3))
    keys = [max(sides["keys"][i], 0) for i in layers]
    axes.bar(layers, keys, color=OURS, label="keys")
    axes.bar(
        layers,
        [max(sides["values"][i], 0) for i in layers],
        bottom=keys,
        color=PUBLISHED,
        label="values",
    )
    axes.set_xlabel("layer that alone is rounded, recipe uniform")
    axes.set_ylabel("KL")
    axes.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("json", type=Path, nargs="+", help="what scripts/accuracy.py wrote")
    parser.add_argument("--docs", type=Path, default=DOCS)
    arguments = parser.parse_args()
    pages = []
    for path in arguments.json:
        record = json.loads(path.read_text(encoding="utf-8"))
        pages.append(model_page(record, path.stem))
        pictures = arguments.docs / "pictures"
        if "methods" in record:
            draw_bits(record, pictures / f"{path.stem}-bits.svg")
        if any(name == "methods" or name.startswith("length-") for name in record):
            draw_positions(record, pictures / f"{path.stem}-positions.svg")
        if "split" in record:
            draw_layers(record, pictures / f"{path.stem}-layers.svg")
    page = arguments.docs / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(
        f"{before}{BEGIN}\n\n" + "\n\n".join(pages) + f"\n\n{END}{after}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
