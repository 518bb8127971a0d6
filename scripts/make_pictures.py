"""Draw the pictures of docs/ from the committed results: python scripts/make_pictures.py"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
EXACT, PACKED, OURS, OTHERS = "#2f6f9f", "#e3a857", "#2f6f9f", "#b5b5b5"
plt.rcParams.update({"font.size": 11, "svg.hashsalt": "oscarkv", "svg.fonttype": "none"})


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(DOCS / "pictures" / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def windows() -> None:
    """Who holds what, for one sequence."""
    figure, axes = plt.subplots(figsize=(9, 2.4))
    axes.barh(1, 64, color=EXACT, height=0.5)
    axes.barh(1, 256, left=944, color=EXACT, height=0.5)
    axes.barh(0, 1200, color=PACKED, height=0.5)
    axes.text(32, 1.42, "sink: 64", ha="center")
    axes.text(1072, 1.42, "recent: 256", ha="center")
    axes.text(500, 1, "no exact copy", ha="center", va="center", color="#777777")
    axes.text(600, 0, "packed history, 2 bits a channel, every token", ha="center", va="center")
    axes.set_yticks([0, 1], ["history pages", "window pages"])
    axes.set_xticks([0, 64, 944, 1200], ["0", "sink", "length - recent", "length"])
    axes.set_ylim(-0.5, 1.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("position")
    save(figure, "windows.svg")


def fidelity() -> None:
    """KL of every recipe on both models."""
    files = {
        "SmolLM2-135M": "fidelity-smollm2-135m.json",
        "Qwen2.5-Coder-1.5B": "fidelity-qwen2.5-coder-1.5b.json",
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axes, (title, file) in zip(panels, files.items(), strict=True):
        recipes = json.loads((DOCS / "results" / file).read_text())["recipes"]
        names = sorted(recipes, key=lambda name: -recipes[name]["kl"])
        values = [recipes[name]["kl"] for name in names]
        colors = [OURS if name in ("balanced", "compact") else OTHERS for name in names]
        axes.barh(range(len(names)), values, color=colors)
        axes.set_yticks(range(len(names)), names)
        for row, value in enumerate(values):
            axes.text(value * 1.15, row, f"{value:.2g}", va="center", fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(3e-5, 60)
        axes.set_title(title)
        axes.set_xlabel("KL to the full-precision cache (log scale)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True)
    figure.tight_layout()
    save(figure, "fidelity.svg")


def layers() -> None:
    """Error of each layer's attention output, `balanced`."""
    figure, axes = plt.subplots(figsize=(9, 2.8))
    for title, file in (
        ("SmolLM2-135M", "fidelity-smollm2-135m.json"),
        ("Qwen2.5-Coder-1.5B", "fidelity-qwen2.5-coder-1.5b.json"),
    ):
        recipe = json.loads((DOCS / "results" / file).read_text())["recipes"]["balanced"]
        errors = {int(layer): error for layer, error in recipe["layer_errors"].items()}
        axes.plot(sorted(errors), [errors[i] for i in sorted(errors)], marker="o", label=title)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of\nthe attention output")
    axes.set_ylim(0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "layers.svg")


if __name__ == "__main__":
    (DOCS / "pictures").mkdir(exist_ok=True)
    windows()
    fidelity()
    layers()
