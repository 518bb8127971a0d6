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


#: Accuracy of both models: file and section.
MODELS = {
    "SmolLM2-135M": ("accuracy-smollm2.json", "methods"),
    "Qwen2.5-Coder-1.5B": ("accuracy-qwen.json", "length-8192"),
}


def fidelity() -> None:
    """KL of every recipe on both models."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    for axes, (title, (file, section)) in zip(panels, MODELS.items(), strict=True):
        found = json.loads((DOCS / "results" / file).read_text())[section]
        recipes, title = found["recipes"], f"{title}, {found['length']:,} tokens"
        names = sorted(recipes, key=lambda name: -recipes[name]["kl"])
        values = [recipes[name]["kl"] for name in names]
        colors = [
            OURS if name in ("balanced", "uniform", "compact", "precise", "retrieval") else OTHERS
            for name in names
        ]
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
    """Error of each layer's attention output, `uniform`."""
    figure, axes = plt.subplots(figsize=(9, 2.8))
    for title, (file, section) in MODELS.items():
        record = json.loads((DOCS / "results" / file).read_text())
        recipe = record[section]["recipes"]["uniform"]
        errors = {int(layer): error for layer, error in recipe["layer_errors"].items()}
        axes.plot(sorted(errors), [errors[i] for i in sorted(errors)], marker="o", label=title)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of\nthe attention output")
    axes.set_ylim(0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "layers.svg")


SLOTS = ("#2f6f9f", "#e3a857", "#6aa37a", "#a5709f")  # of a byte, from its lowest bits up
ZERO = "#eeeeee"


def kernels() -> None:
    """How a packed word becomes registers of the matrix units: keys on the left, values right."""
    figure, axes = plt.subplots(figsize=(11, 5.6))

    def register(
        x: float, y: float, fields: list[int | None], texts: list[str], at: float = 0.5
    ) -> None:
        """Sixteen fields of 2 bits, the lowest on the right; `None`: zero. A text for each byte
        or half, `at` its width from the left."""
        for field, slot in enumerate(fields):
            color = ZERO if slot is None else SLOTS[slot]
            place = (x + 15 - field, y)
            axes.add_patch(plt.Rectangle(place, 1, 1, facecolor=color, edgecolor="white"))
        width = 16 / len(texts)
        for part, text in enumerate(texts):
            axes.text(x + width * (part + at), y + 0.5, text, ha="center", va="center", fontsize=9)
            if part:
                axes.plot([x + width * part] * 2, [y - 0.1, y + 1.1], color="#333333", lw=1.2)

    def note(x: float, y: float, text: str, **style: object) -> None:
        axes.text(x, y, text, va="center", **{"fontsize": 10, **style})

    word = [0, 1, 2, 3] * 4
    note(0, 12.7, "keys: bytes", fontsize=12, weight="bold")
    note(0, 11.9, "one word of a token: 16 codes, four to a byte")
    register(0, 9.8, word, [""] * 4)
    for slot in range(4):
        y = 7.4 - 1.7 * slot
        register(0, y, [None, None, None, slot] * 4, ["64 c"] * 4, at=0.62)
        steps = ("× 64, AND", "× 16, AND", "× 4, AND", "AND")[slot]
        note(16.4, y + 0.5, steps)
    note(0, 9.1, "four registers of four bytes: AND 0xc0c0c0c0")
    note(0, 1.1, "A operand of m16n8k32, unsigned bytes × signed bytes")

    left = 24.0
    note(left, 12.7, "values: halves", fontsize=12, weight="bold")
    note(left, 11.9, "the same half word of two tokens, put together by one byte permute")
    register(left, 9.8, word, [""] * 2)
    note(left + 4, 11.15, "token 2t + 1", ha="center", fontsize=9)
    note(left + 12, 11.15, "token 2t", ha="center", fontsize=9)
    for slot in range(4):
        y = 7.4 - 1.7 * slot
        half = [slot if field == slot else None for field in range(8)]
        label = rf"c $4^{slot}\,2^{{-24}}$"
        register(left, y, half * 2, [label] * 2, at=0.25)
        note(left + 16.4, y + 0.5, f"AND 0x{0x00030003 << 2 * slot:08x}")
    note(left, 9.1, "slots 0 to 3, one AND each; after one shift by 8, slots 4 to 7")
    note(left, 1.1, "A operand of m16n8k16: each half a float16 subnormal, exact")
    axes.set_xlim(-0.3, 46)
    axes.set_ylim(0.6, 13.2)
    axes.axis("off")
    save(figure, "kernels.svg")


if __name__ == "__main__":
    (DOCS / "pictures").mkdir(exist_ok=True)
    windows()
    fidelity()
    layers()
    kernels()
