"""What a user asks for: `--additional-config '{"oscarkv": {"artifact": FILE, ...}}'`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from oscarkv.artifact import Artifact, load_artifact
from oscarkv.codec import PageLayout
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.recipe import Recipe

SECTION = "oscarkv"
MAX_PAGE = 256
#: Known by name only: asking whether one can run here would start CUDA in vLLM's first process.
BACKENDS = ("cuda", "triton", "torch")
EXAMPLE = '{"oscarkv": {"artifact": FILE}}'
NEEDS_ARTIFACT = (
    "--attention-backend CUSTOM is oscarkv's, which needs an artifact: "
    f"--additional-config '{EXAMPLE}'"
)


@dataclass(frozen=True)
class Settings:
    """One key of the section each."""

    artifact: str
    sink: int | None = None  # instead of the recipe's
    recent: int | None = None
    skip: Sequence[int] = ()  # layers that keep vLLM's own cache
    strict: bool = False
    backend: str = "auto"
    enabled: bool = True
    canary: dict[str, Any] | None = None  # canary/options.py

    @property
    def loaded(self) -> Artifact:
        return _load(self.artifact)

    @property
    def recipe(self) -> Recipe:
        if self.loaded.mixed:
            raise OscarError(
                f"{self.artifact}: its layers have different bits (oscarkv tune), and vLLM's pages "
                "are all of one size; use an artifact of oscarkv calibrate here"
            )
        windows = {"sink": self.sink, "recent": self.recent}
        changed = {name: value for name, value in windows.items() if value is not None}
        return self.loaded.recipe.replace(**changed)


def _section(config: Any) -> dict[str, Any] | None:
    extra = config.additional_config if config is not None else None
    section = extra.get(SECTION) if isinstance(extra, dict) else None
    if section is not None and not isinstance(section, dict):
        raise OscarError(f'"oscarkv": {section!r} in --additional-config; it wants {EXAMPLE}')
    return section


def switched_off(config: Any) -> bool:
    section = _section(config)
    return section is not None and not section.get("enabled", True)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _is_layers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(x) is int and x >= 0 for x in value)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


#: What each option may be: in words, and whether a value is.
_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "artifact": ("the path of a file", lambda x: isinstance(x, str)),
    "sink": ("a number of tokens", _is_count),
    "recent": ("a number of tokens", _is_count),
    "skip": ("a list of layers, counted from 0", _is_layers),
    "strict": ("true or false", _is_switch),
    "backend": (f"one of auto, {', '.join(BACKENDS)}", lambda x: x in ("auto", *BACKENDS)),
    "enabled": ("true or false", _is_switch),
    "canary": ("a section, such as {}", lambda x: x is None or isinstance(x, dict)),
}


def settings_of(config: Any) -> Settings | None:
    """The settings in a VllmConfig; None if it has none, or they are switched off."""
    section = _section(config)
    if section is None:
        return None
    known = [field.name for field in fields(Settings)]
    unknown = sorted(set(section) - set(known))
    if unknown:
        raise OscarError(f"unknown oscarkv option {', '.join(unknown)}; known: {', '.join(known)}")
    if switched_off(config):
        return None
    if "artifact" not in section:
        raise OscarError(f"oscarkv needs an artifact: --additional-config '{EXAMPLE}'")
    for name, value in section.items():
        wanted, fits = _OPTIONS.get(name, ("", None))
        if fits is not None and not fits(value):
            raise OscarError(f"oscarkv option {name} is {value!r}; it wants {wanted}")
    return Settings(**section)


@lru_cache(maxsize=4)
def _load(path: str) -> Artifact:
    return load_artifact(path)


def window_page_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one window page for one KV head: keys and values of 16 tokens."""
    return 2 * PAGE_QUANTUM * head_dim * dtype.itemsize


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
