"""Checks of a server's configuration."""

from __future__ import annotations

import logging
from typing import Any

from oscarkv.integrations.sglang import options

logger = logging.getLogger("sglang.oscarkv")


def check_config(server_args: Any) -> None:
    """Refuse what cannot work, in one line; settle what follows from the rest."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution

    settings = options.settings_of(server_args)
    if settings is None:
        return
    model = model_config_of(server_args)
    layout = options.page_layout(settings.recipe, model.head_dim, model.dtype)
    declare_resolution(
        server_args,
        "oscarkv",
        attention_backend=options.NAME,
        radix_cache_backend=options.NAME,
        page_size=layout.page_size,
    )
