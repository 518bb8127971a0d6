"""What pages share: their style, figures as SVG in the page's own text colour, and marked text."""

from __future__ import annotations

import difflib
import io
import re
from html import escape
from importlib.resources import files
from typing import Any

from oscarkv.errors import MissingDependencyError

#: Mid-tones that read on white and on near-black.
COLOURS = {
    "full precision": "#6b7280",
    "bf16": "#6b7280",
    "balanced": "#3b82f6",
    "compact": "#06b6d4",
    "precise": "#6366f1",
    "retrieval": "#0d9488",
    "paper": "#f59e0b",
    "quarot-int2": "#10b981",
    "naive-int2": "#ef4444",
}
OTHERS = ("#8b5cf6", "#ec4899", "#84cc16", "#d97706", "#14b8a6", "#a855f7", "#f43f5e", "#0ea5e9")
#: Stands for the text colour until the SVG is written; no figure uses it otherwise.
INK = "#010203"


def style() -> str:
    return (files(__package__) / "style.css").read_text(encoding="utf-8")


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'reports need matplotlib: pip install "oscarkv[demo]"'
        ) from None


def colour(recipe: str) -> str:
    """A recipe's colour, the same on every page."""
    known = COLOURS.get(recipe)
    return known or OTHERS[sum(map(ord, recipe)) % len(OTHERS)]


def swatch(recipe: str) -> str:
    return f'<span class="swatch" style="background:{colour(recipe)}"></span>'


def figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.patch.set_alpha(0)
    axes = made.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=INK, labelcolor=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.spines["bottom"].set_alpha(0.4)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    axes.grid(True, which="major", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    return made, axes


def svg(made: Any, salt: str) -> str:
    import matplotlib

    # The salt keeps the ids of several figures on one page apart, and the same in every run.
    settings = {"svg.hashsalt": salt, "svg.fonttype": "none"}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        made.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # The page's font and size apply, and it scales with its column.
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", text, count=1)
    return text.replace(INK, "currentColor")


def marked(a: str, b: str) -> tuple[str, str]:
    """Two texts as HTML, with the words that differ marked."""
    left, right = (re.findall(r"\s+|\S+", text) for text in (a.strip(), b.strip()))
    html: tuple[list[str], list[str]] = ([], [])
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        for side, words in ((0, left[a0:a1]), (1, right[b0:b1])):
            text = escape("".join(words))
            html[side].append(text if kind == "equal" or not text else f"<mark>{text}</mark>")
    return "".join(html[0]), "".join(html[1])
