"""The report's figures, as SVG that takes the page's own text colour."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oscarkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from oscarkv.evaluation.fidelity import RecipeScore

#: Mid-tones that read on white and on near-black.
COLOURS = {
    "balanced": "#3b82f6",
    "paper": "#f59e0b",
    "quarot-int2": "#10b981",
    "naive-int2": "#ef4444",
}
OTHER_COLOUR = "#8b5cf6"
#: Stands for the text colour until the SVG is written; no figure uses it otherwise.
_INK = "#010203"


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'the demo needs matplotlib: pip install "oscarkv[demo]"'
        ) from None


def colour(recipe: str) -> str:
    return COLOURS.get(recipe, OTHER_COLOUR)


def kl_bars(scores: Mapping[str, RecipeScore]) -> str:
    figure, axes = _figure(5.2, 0.55 * len(scores) + 0.9)
    names = sorted(scores, key=lambda name: scores[name].kl, reverse=True)
    values = [scores[name].kl for name in names]
    spreads = [scores[name].kl_se for name in names]
    axes.barh(names, values, color=[colour(name) for name in names], height=0.62)
    axes.errorbar(values, names, xerr=spreads, fmt="none", ecolor=_INK, capsize=3, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 3)
    for name, value, spread in zip(names, values, spreads, strict=True):
        axes.annotate(
            f"{value:.3g}",
            (value + spread, name),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
        )
    axes.set_xlabel("KL divergence from the full-precision cache (log scale)")
    return _svg(figure, "kl")


def bits_against_kl(scores: Mapping[str, RecipeScore]) -> str:
    figure, axes = _figure(5.2, 3.1)
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
            color=_INK,
        )
    values = [score.kl for score in scores.values()]
    bits = [score.bits_128k for score in scores.values()]
    axes.set_yscale("log")
    axes.set_ylim(min(values) / 2.5, max(values) * 2.5)
    axes.set_xlim(min(bits) - 0.15, max(bits) + 0.15)
    axes.set_xlabel("bits per element at 128K context, all included")
    axes.set_ylabel("KL (log scale)")
    return _svg(figure, "bits")


def layer_errors(scores: Mapping[str, RecipeScore]) -> str:
    figure, axes = _figure(10.8, 3.1)
    for name, score in scores.items():
        layers = sorted(score.layer_errors)
        errors = [score.layer_errors[layer] for layer in layers]
        axes.plot(layers, errors, color=colour(name), label=name, marker="o", markersize=3.5)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error (log scale)")
    legend = axes.legend(frameon=False, ncols=len(scores), loc="lower left", bbox_to_anchor=(0, 1))
    for text in legend.get_texts():
        text.set_color(_INK)
    return _svg(figure, "layers")


def memory_bars(rows: Sequence[tuple[str, float, float]], recipe: str) -> str:
    """Rows of (context, full-precision bytes, packed bytes), as shares of full precision."""
    figure, axes = _figure(5.2, 0.6 * len(rows) + 0.9)
    names = [name for name, _, _ in rows][::-1]
    shares = [packed / full for _, full, packed in rows][::-1]
    axes.barh(names, [1.0] * len(rows), color=_INK, alpha=0.13, height=0.62)
    axes.barh(names, shares, color=colour(recipe), height=0.62)
    for (name, full, packed), share in zip(rows[::-1], shares, strict=True):
        axes.annotate(
            f"{full / 1e6:,.1f} → {packed / 1e6:,.1f} MB ({full / packed:.1f}x)",
            (share, name),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
        )
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("share of a bf16 cache, one sequence")
    return _svg(figure, "memory")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=_INK, labelcolor=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.spines["bottom"].set_alpha(0.4)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_INK)
    axes.grid(True, which="major", color=_INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any, salt: str) -> str:
    import matplotlib

    # The salt keeps the ids of several figures on one page apart, and the same in every run.
    settings = {"svg.hashsalt": salt, "svg.fonttype": "none"}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # The page's font and size apply, and it scales with its column.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace(_INK, "currentColor")
