"""The figures of the page of comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oscarkv.evaluation.compare.page import INK, colour, figure, svg
from oscarkv.evaluation.needle_plot import short
from oscarkv.evaluation.paired import Gap


def _legend(axes: Any, columns: int) -> None:
    legend = axes.legend(
        frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2
    )
    for text in legend.get_texts():
        text.set_color(INK)


def pareto(points: Mapping[str, tuple[float, float]], *, label: str, log: bool, salt: str) -> str:
    """Bits against a figure that is better when lower; the line joins what nothing beats."""
    made, axes = figure(5.4, 3.5)
    ordered = sorted(points.items(), key=lambda item: (item[1][0], item[1][1]))
    best, front = float("inf"), []
    for _, (bits, value) in ordered:
        if value < best:
            best = value
            front.append((bits, value))
    if len(front) > 1:
        xs, ys = zip(*front, strict=True)
        axes.step(xs, ys, where="post", color=INK, alpha=0.3, linewidth=1.2, linestyle="--")
    width = max(0.3, ordered[-1][1][0] - ordered[0][1][0])
    for name, (bits, value) in points.items():
        axes.scatter([bits], [value], s=70, color=colour(name), zorder=3)
        # A name stands to the right of its point, unless another point is there.
        right = not any(
            0 < other - bits < 0.4 * width and _alike(value, y, log) for other, y in points.values()
        )
        axes.annotate(
            name,
            (bits, value),
            xytext=(9 if right else -9, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            color=INK,
            fontsize=9,
        )
    all_bits = [bits for bits, _ in points.values()]
    values = [value for _, value in points.values()]
    if log:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 2.5, max(values) * 2.5)
    spread = max(0.3, max(all_bits) - min(all_bits))
    if max(all_bits) > 4 * min(all_bits):
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(all_bits) * 0.7, max(all_bits) * 1.6)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    else:
        axes.set_xlim(min(all_bits) - 0.35 * spread, max(all_bits) + 0.35 * spread)
    axes.set_xlabel("bits per element at 128K context, all included")
    axes.set_ylabel(label)
    return svg(made, salt)


def _alike(a: float, b: float, log: bool) -> bool:
    """Whether two points are about as high: KL, or points lost."""
    return max(a, b) < 1.6 * min(a, b) if log else abs(a - b) < 2


def by_position(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    made, axes = figure(10.8, 3.4)
    shown = [name for name, score in recipes.items() if score.get("kl_by_position")]
    for name in shown:
        cells = recipes[name]["kl_by_position"]
        middle = [(cell["start"] + cell["stop"]) / 2 for cell in cells]
        values = [cell["kl"] for cell in cells]
        spread = [cell.get("kl_se") or 0.0 for cell in cells]
        axes.plot(middle, values, color=colour(name), label=name, marker="o", markersize=3.5)
        low = [max(v - s, v / 10) for v, s in zip(values, spread, strict=True)]
        high = [v + s for v, s in zip(values, spread, strict=True)]
        axes.fill_between(middle, low, high, color=colour(name), alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("position of the query")
    axes.set_ylabel("KL (log scale)")
    _legend(axes, max(1, min(6, len(shown))))
    return svg(made, "positions")


def by_length(fidelity: Sequence[Mapping[str, Any]]) -> str:
    made, axes = figure(5.4, 3.4)
    names = list(dict.fromkeys(name for one in fidelity for name in one["recipes"]))
    lengths = [one["length"] for one in fidelity]
    shown = 0
    for name in names:
        pairs = [
            (one["length"], one["recipes"][name]["kl"])
            for one in fidelity
            if one["recipes"].get(name, {}).get("kl") is not None
        ]
        if len(pairs) > 1:
            shown += 1
            xs, ys = zip(*pairs, strict=True)
            axes.plot(xs, ys, color=colour(name), label=name, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context")
    axes.set_ylabel("KL (log scale)")
    _legend(axes, 3)
    return svg(made, "lengths") if shown else ""


def layer_bars(recipes: Mapping[str, Mapping[str, Any]], most: int = 4) -> str:
    """Relative error of attention, layer by layer, of the best few recipes."""
    shown = [name for name, score in recipes.items() if score.get("layer_errors")][:most]
    if not shown:
        return ""
    made, axes = figure(10.8, 3.3)
    layers = sorted({int(layer) for name in shown for layer in recipes[name]["layer_errors"]})
    width = 0.84 / len(shown)
    for index, name in enumerate(shown):
        errors = {int(k): v for k, v in recipes[name]["layer_errors"].items()}
        places = [layer - 0.42 + width * (index + 0.5) for layer in layers]
        heights = [errors.get(layer) or 0.0 for layer in layers]
        axes.bar(places, heights, width, color=colour(name), label=name)
    axes.set_yscale("log")
    axes.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error (log scale)")
    axes.grid(False, axis="x")
    _legend(axes, len(shown))
    return svg(made, "layers")


def sensitivity_bars(parts: Sequence[Mapping[str, Any]]) -> str:
    """KL with one layer's keys, or values, rounded and all else exact."""
    made, axes = figure(10.8, 3.1)
    for sides, shade, name in (("keys", 1.0, "keys"), ("values", 0.45, "values")):
        cells = {
            part["layer"]: part["kl"]
            for part in parts
            if part["sides"] == sides and part["layer"] is not None and part["head"] is None
        }
        if cells:
            shift = -0.2 if sides == "keys" else 0.2
            places = [layer + shift for layer in cells]
            axes.bar(places, list(cells.values()), 0.38, color="#3b82f6", alpha=shade, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel("KL")
    axes.grid(False, axis="x")
    if axes.get_legend_handles_labels()[0]:
        _legend(axes, 2)
    return svg(made, "sensitivity")


def forest(rows: Sequence[tuple[str, str, Gap]]) -> str:
    """Gaps to full precision with their intervals: (task, recipe, gap)."""
    made, axes = figure(10.8, 0.42 * len(rows) + 1.0)
    axes.axvline(0, color=INK, alpha=0.5, linewidth=1)
    for place, (_, name, gap) in enumerate(reversed(rows)):
        low, middle, high = (100 * x for x in (gap.low, gap.difference, gap.high))
        axes.plot([low, high], [place, place], color=colour(name), linewidth=2.4)
        axes.scatter([middle], [place], color=colour(name), s=44, zorder=3)
    axes.set_yticks(range(len(rows)), [f"{task} · {name}" for task, name, _ in reversed(rows)])
    axes.set_xlabel("points more or less than full precision, 95 % interval")
    axes.set_ylim(-0.7, len(rows) - 0.3)
    return svg(made, "forest")
