"""The text that every calibration sees beside its own, so that no kind of text is fitted alone.

Fitted to one narrow kind (school problems, say), transforms serve that kind and cost others twice
the error. So three statistics count alike: those of the given text, of these documents, and of
their echoes. An echo is a passage that comes twice: its second reading is predicted by heads that
look up the first, far back, which running text asks of them too rarely to be measured by.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def general_texts() -> tuple[str, ...]:
    """Code in many languages, conversations, and reference prose with tables and other tongues."""
    folder = resources.files("oscarkv.calibration") / "texts"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    return tuple(file.read_text(encoding="utf-8") for file in files)
