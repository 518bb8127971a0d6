"""The report's figures, as SVG that takes the page's own text colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oscarkv.evaluation.compare.page import INK, colour, figure, svg

if TYPE_CHECKING:
    from oscarkv.evaluation.fidelity import RecipeScore


def kl_bars(scores: Mapping[str, RecipeScore]) -> str:
    made, axes = figure(5.2, 0.55 * len(scores) + 0.9)
    names = sorted(scores, key=lambda name: scores[name].kl, reverse=True)
    values = [scores[name].kl for name in names]
    spreads = [scores[name].kl_se for name in names]
    axes.barh(names, values, color=[colour(name) for name in names], height=0.62)
    axes.errorbar(values, names, xerr=spreads, fmt="none", ecolor=INK, capsize=3, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 3)
    for name, value, spread in zip(names, values, spreads, strict=True):
        axes.annotate(
            f"{value:.3g}",
            (value + spread, name),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_xlabel("KL divergence from the full-precision cache (log scale)")
    return svg(made, "kl")


def bits_against_kl(scores: Mapping[str, RecipeScore]) -> str:
    made, axes = figure(5.2, 3.1)
    # Points with equal bits would have their names on top of each other: they alternate sides.
    for index, name in enumerate(sorted(scores, key=lambda name: scores[name].kl)):
        score = scores[name]
        axes.scatter([score.bits_128k], [score.kl], s=70, color=colour(name), zorder=3)
        axes.annotate(
            name,
            (score.bits_128k, score.kl),
            xytext=(9 if index % 2 == 0 else -9, 0),
            textcoords="offset points",
            ha="left" if index % 2 == 0 else "right",
            va="center",
            color=INK,
        )
    values = [score.kl for score in scores.values()]
    bits = [score.bits_128k for score in scores.values()]
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 2.5, max(values) * 2.5)
    axes.set_xlim(min(bits) - 0.15, max(bits) + 0.15)
    axes.set_xlabel("bits per element at 128K context, all included")
    axes.set_ylabel("KL (log scale)")
    return svg(made, "bits")


def layer_errors(scores: Mapping[str, RecipeScore]) -> str:
    made, axes = figure(10.8, 3.1)
    for name, score in scores.items():
        layers = sorted(score.layer_errors)
        errors = [score.layer_errors[layer] for layer in layers]
        axes.plot(layers, errors, color=colour(name), label=name, marker="o", markersize=3.5)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error (log scale)")
    legend = axes.legend(frameon=False, ncols=len(scores), loc="lower left", bbox_to_anchor=(0, 1))
    for text in legend.get_texts():
        text.set_color(INK)
    return svg(made, "layers")


def memory_bars(rows: Sequence[tuple[str, float, float]], recipe: str) -> str:
    """Rows of (context, full-precision bytes, packed bytes), as shares of full precision."""
    made, axes = figure(5.2, 0.6 * len(rows) + 0.9)
    names = [name for name, _, _ in rows][::-1]
    shares = [packed / full for _, full, packed in rows][::-1]
    axes.barh(names, [1.0] * len(rows), color=INK, alpha=0.13, height=0.62)
    axes.barh(names, shares, color=colour(recipe), height=0.62)
    for (name, full, packed), share in zip(rows[::-1], shares, strict=True):
        axes.annotate(
            f"{full / 1e6:,.1f} → {packed / 1e6:,.1f} MB ({full / packed:.1f}x)",
            (share, name),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("share of a bf16 cache, one sequence")
    return svg(made, "memory")
