"""Checks of a server's configuration, in the process that makes it, before any worker starts."""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from oscarkv.errors import OscarError
from oscarkv.integrations.vllm.capacity import Capacity
from oscarkv.integrations.vllm.layers import check_model
from oscarkv.integrations.vllm.settings import Settings, page_layout, settings_of, switched_off

logger = init_logger("vllm.oscarkv")  # below "vllm", whose handlers print

#: Connectors that follow the windows' null blocks.
CONNECTORS = ("DecodeBenchConnector",)


def check_config(config: Any) -> None:
    """Refuse what cannot work, in one line; say what the cache will cost. `config`: VllmConfig."""
    settings = settings_of(config)
    if settings is None:
        return
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    check_model(settings.loaded, model)
    missing = sorted(set(range(settings.loaded.model.layers)) - set(settings.loaded.layers))
    page = page_layout(settings.recipe, model.get_head_size(), model.dtype).page_size
    connector = config.kv_transfer_config and config.kv_transfer_config.kv_connector
    chosen = config.attention_config.backend
    refused = {
        f"layers {missing} have no transforms in {settings.artifact}": bool(missing),
        f"--kv-cache-dtype {cache.cache_dtype}: the cache is oscarkv's": cache.cache_dtype
        != "auto",
        f"--block-size {cache.block_size}: pages hold {page} tokens; leave it out": bool(
            cache.user_specified_block_size and cache.block_size != page
        ),
        # Before the next one, which some connectors bring about.
        f"the KV connector {connector}: only {', '.join(CONNECTORS)} is known to fit": bool(
            connector and connector not in CONNECTORS
        ),
        "--disable-hybrid-kv-cache-manager: windows are a cache group of their own": bool(
            config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "--enable-dbo: a step is planned once for all layers": bool(parallel.use_ubatching),
        f"recipe {settings.recipe.name!r}: it packs nothing": settings.recipe.exact,
        # Without this the server would run stock attention, and nobody would know.
        "vLLM's own attention: say --attention-backend CUSTOM": bool(
            chosen is not AttentionBackendEnum.CUSTOM and not current_platform.is_cpu()
        ),
    }
    for what, present in refused.items():
        if present:
            raise OscarError(f"oscarkv cannot be used with {what}")
    logger.info("oscarkv: %s", describe(config, settings))


def describe(config: Any, settings: Settings) -> str:
    """What a request of the longest length takes, padding and windows included."""
    model, recipe = config.model_config, settings.recipe
    length = model.max_model_len
    capacity = Capacity(1, 1, model.get_head_size(), model.dtype, recipe, length)
    return (
        f"recipe {recipe.name}, sink {recipe.sink}, recent {recipe.recent}, pages of "
        f"{capacity.layout.page_size} tokens; at {length:,} tokens {capacity.bits:.2f} bits an "
        f"element are reserved, and memory holds {capacity.gain:.2f}x the tokens of a "
        f"{str(model.dtype).removeprefix('torch.')} cache"
    )


def step_aside(arguments: Any) -> None:
    """`"enabled": false` is one flag: the backend that was asked for beside it goes too, and vLLM
    chooses as it would without us. `arguments`: EngineArgs."""
    if not switched_off(arguments):
        return
    for holder, name in ((arguments, "attention_backend"), (arguments.attention_config, "backend")):
        chosen = getattr(holder, name)
        if getattr(chosen, "name", chosen) == AttentionBackendEnum.CUSTOM.name:
            setattr(holder, name, None)
    logger.info("oscarkv: switched off; the cache is vLLM's own")


def install() -> None:
    """Have vLLM's own argument handling end with the check: it has no hook for that."""
    from vllm.engine.arg_utils import EngineArgs

    plain = EngineArgs.create_engine_config
    if getattr(plain, "_oscarkv", False):
        return

    @functools.wraps(plain)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        step_aside(self)
        config = plain(self, *arguments, **options)
        check_config(config)
        return config

    create_engine_config._oscarkv = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
