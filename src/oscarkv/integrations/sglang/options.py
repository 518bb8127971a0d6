"""What a user asks SGLang for: `--attention-backend oscarkv --oscarkv-artifact FILE ...`.

SGLang's `ServerArgs` takes no fields of others, but what lies beside them, under names with an
underscore, reaches all of its processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from oscarkv.codec import PageLayout
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving.settings import BACKENDS, Settings, window_page_bytes
from oscarkv.recipe import Recipe

NAME = "oscarkv"
FLAG = "--oscarkv-artifact FILE"
NEEDS_ARTIFACT = f"--attention-backend oscarkv needs an artifact: {FLAG}"
MAX_PAGE = 1024
_PREFIX = "oscarkv_"
_KEPT = "_oscarkv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("oscarkv")
    none = argparse.SUPPRESS  # absent unless given: defaults are the settings' own
    group.add_argument("--oscarkv-artifact", metavar="FILE", default=none, help="The model's.")
    for name in ("sink", "recent"):
        group.add_argument(
            f"--oscarkv-{name}", type=int, metavar="N", default=none, help="Not the recipe's."
        )
    for name, text in (
        ("strict", "Answers that do not depend on chunks and prefix hits."),
        ("uniform", "The recipe's bits in all layers: more tokens, less exact answers."),
    ):
        group.add_argument(f"--oscarkv-{name}", action="store_true", default=none, help=text)
    group.add_argument(
        "--oscarkv-backend", choices=("auto", *BACKENDS), default=none, help="The kernels."
    )


def take(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove our arguments from others' and return them, without their prefix."""
    ours = [name for name in arguments if name.startswith(_PREFIX)]
    return {name.removeprefix(_PREFIX): arguments.pop(name) for name in ours}


def keep(server_args: Any, section: dict[str, Any]) -> None:
    """Have a ServerArgs carry them."""
    if section:
        setattr(server_args, _KEPT, section)


def asked_for(server_args: Any) -> bool:
    """Whether a server names our attention."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, name, None) == NAME for name in names)


def settings_of(server_args: Any) -> Settings | None:
    """The settings in a ServerArgs; None if it does not ask for oscarkv."""
    section = getattr(server_args, _KEPT, None)
    if not asked_for(server_args):
        if section:
            raise OscarError(
                "oscarkv's options without its attention: say --attention-backend oscarkv"
            )
        return None
    for name in ("skip", "enabled"):  # vLLM's plugin has these; they would do nothing here
        if name in (section or {}):
            raise OscarError(f"oscarkv_{name}: the SGLang plugin has no such option")
    return Settings.of(section or {}, NEEDS_ARTIFACT)


def active() -> Settings | None:
    """Those of this process's server."""
    from sglang.srt.runtime_context import get_server_args

    return settings_of(get_server_args())


def longest() -> int:
    """Tokens of the longest request of this process's server."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.runtime_context import get_server_args

    return int(model_config_of(get_server_args()).context_len)


def page_layout(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> PageLayout:
    """The smallest history page that has room for a window page. A power of two tokens: SGLang
    wants chunks of prompts to be whole pages, and its own are powers of two."""
    room, size = window_page_bytes(head_dim, dtype), PAGE_QUANTUM
    while size <= MAX_PAGE:
        layout = PageLayout.of(recipe, head_dim, size)
        if layout.bytes >= room:
            return layout
        size *= 2
    raise OscarError(f"a page of {MAX_PAGE} packed tokens has no room for 16 exact ones")
