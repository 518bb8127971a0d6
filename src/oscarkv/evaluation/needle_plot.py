"""Depth x length heat maps of retrieval, one for every setting and kind with one needle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscarkv.artifact.files import write_atomically
from oscarkv.errors import MissingDependencyError, OscarError
from oscarkv.evaluation.needle import Needles

KINDS = ("single", "multikey")
TITLES = {"single": "one needle", "multikey": "one of eight keys"}


def draw(record: Needles, ink: str = "#222222") -> Any:
    """A figure with a row for each kind and a column for each setting."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError('plots need matplotlib: pip install "oscarkv[demo]"') from None
    settings = [name for name in record.settings if any(record.grid(name, k) for k in KINDS)]
    if not settings:
        raise OscarError("there are no answers to draw yet")
    figure = Figure(figsize=(2.6 * len(settings) + 1.2, 5.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(len(KINDS), len(settings), squeeze=False)
    image: Any = None
    for row, kind in enumerate(KINDS):
        for column, name in enumerate(settings):
            image = _heat_map(axes[row][column], record, name, kind, ink)
            if row == 0:
                axes[row][column].set_title(name, color=ink, fontsize=10)
            if column == 0:
                axes[row][column].set_ylabel(f"{TITLES[kind]}\ndepth", color=ink)
            else:
                axes[row][column].set_yticklabels([])
            if row == len(KINDS) - 1:
                axes[row][column].set_xlabel("context", color=ink)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, format=lambda x, _: f"{x:.0%}")
    bar.ax.tick_params(colors=ink, labelcolor=ink, length=0)
    bar.outline.set_visible(False)
    return figure


def _heat_map(axes: Any, record: Needles, setting: str, kind: str, ink: str) -> Any:
    cells = record.grid(setting, kind)
    depths = sorted({depth for _, depth in cells})
    rows = [[cells.get((n, d), (float("nan"), 0))[0] for n in record.lengths] for d in depths]
    image = axes.imshow(rows, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.patch.set_alpha(0)
    axes.set_xticks(range(len(record.lengths)), [short(n) for n in record.lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.tick_params(colors=ink, labelcolor=ink, length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value == value:
                axes.text(
                    x,
                    y,
                    f"{100 * value:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#1b2430",
                )
    return image


def short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"


def save_heat_maps(record: Needles, path: Path) -> None:
    kind = path.suffix.removeprefix(".")
    if kind not in ("svg", "png", "pdf"):
        raise OscarError(f"--plot {path}: name an .svg, .png or .pdf file")
    figure = draw(record)
    figure.patch.set_alpha(1)
    figure.patch.set_facecolor("white")

    def write(part: Path) -> None:
        figure.savefig(part, format=kind, dpi=160)

    write_atomically(path, write)
