"""What a user asks vLLM for: `--additional-config '{"oscarkv": {"artifact": FILE, ...}}'`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oscarkv.codec import PageLayout
from oscarkv.codec.layout import ALIGNMENT, PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving import settings as serving
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.recipe import Recipe

SECTION = "oscarkv"
MAX_PAGE = 256
EXAMPLE = '{"oscarkv": {"artifact": FILE}}'
NEEDS_ARTIFACT = (
    "--attention-backend CUSTOM is oscarkv's, which needs an artifact: "
    f"--additional-config '{EXAMPLE}'"
)


@dataclass(frozen=True)
class Settings(serving.Settings):
    """One key of the section each."""

    fold_values: bool = False  # into the weights, instead of a transform in every layer and step
    canary: dict[str, Any] | None = None  # canary/options.py

    def layout_of(self, layer: int, head_dim: int, dtype: torch.dtype) -> PageLayout:
        """A layer's pages: of as many tokens as every other's, whatever bits it has."""
        size = page_layout(self.recipe, head_dim, dtype).page_size
        return PageLayout.of(self.layer_recipe(layer), head_dim, size)

    def page_bytes_of(self, layer: int, head_dim: int, dtype: torch.dtype) -> int:
        """What vLLM gives a page of a head of that layer."""
        known = sorted(self.loaded.layers)
        layouts = [self.layout_of(each, head_dim, dtype) for each in known]
        return page_bytes(layouts, dtype)[known.index(layer)]


def _section(config: Any) -> dict[str, Any] | None:
    extra = config.additional_config if config is not None else None
    section = extra.get(SECTION) if isinstance(extra, dict) else None
    if section is not None and not isinstance(section, dict):
        raise OscarError(f'"oscarkv": {section!r} in --additional-config; it wants {EXAMPLE}')
    return section


def switched_off(config: Any) -> bool:
    section = _section(config)
    return section is not None and not section.get("enabled", True)


def change(config: Any, **options: Any) -> None:
    """Set options of ours, as if the user had."""
    changed = {SECTION: (_section(config) or {}) | options}
    config.additional_config = config.additional_config | changed


def settings_of(config: Any) -> Settings | None:
    """The settings in a VllmConfig; None if it has none, or they are switched off."""
    section = _section(config)
    if section is None:
        return None
    return Settings.of(section, f"oscarkv needs an artifact: --additional-config '{EXAMPLE}'")


def page_bytes(layouts: Sequence[PageLayout], dtype: torch.dtype) -> list[int]:
    """What vLLM gives a page of a head, for each layer: at least a window page's bytes, so that a
    block has room for the windows of all layers.

    Of pages of several sizes, as many of each, vLLM makes a pattern, and splits the windows by it:
    then the last of the largest gets a few bytes more.
    """
    room = [window_page_bytes(layout.head_dim, dtype) for layout in layouts]
    sizes = [max(layout.bytes, least) for layout, least in zip(layouts, room, strict=True)]
    counts = Counter(sizes)
    if len(counts) > 1 and len(set(counts.values())) == 1:
        last = max(range(len(sizes)), key=lambda i: (sizes[i], i))
        sizes[last] += ALIGNMENT
    return sizes


def page_layout(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> PageLayout:
    """The largest history page that fits the bytes of a window page."""
    room = window_page_bytes(head_dim, dtype)
    best = None
    for size in range(PAGE_QUANTUM, MAX_PAGE + 1, PAGE_QUANTUM):
        layout = PageLayout.of(recipe, head_dim, size)
        if layout.bytes <= room:
            best = layout
    if best is None:
        raise OscarError(f"no page of 16 packed tokens fits {room} bytes of head_dim {head_dim}")
    return best
