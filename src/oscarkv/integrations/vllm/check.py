"""Checks of a server's configuration, in the process that makes it, before any worker starts."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, iter_layer_specs

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import OscarError
from oscarkv.integrations.serving.windows import blocks_for
from oscarkv.integrations.vllm.canary import attach
from oscarkv.integrations.vllm.capacity import Capacity
from oscarkv.integrations.vllm.layers import check_model
from oscarkv.integrations.vllm.settings import (
    NEEDS_ARTIFACT,
    Settings,
    change,
    page_layout,
    settings_of,
    switched_off,
)
from oscarkv.integrations.vllm.windows import SUFFIX, WindowSpec

logger = init_logger("vllm.oscarkv")  # below "vllm", whose handlers print

#: Connectors that follow the windows' null blocks.
CONNECTORS = ("DecodeBenchConnector", "SimpleCPUOffloadConnector")


def check_config(config: Any) -> None:
    """Refuse what cannot work, in one line; say what the cache will cost. `config`: VllmConfig."""
    settings = settings_of(config)
    if settings is None:
        _refuse_bare_backend(config)
        return
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    check_model(settings.loaded, model)
    outside = [layer for layer in settings.skip if layer >= settings.loaded.model.layers]
    packed = set(settings.loaded.layers) - set(settings.skip)
    kept = sorted(set(range(settings.loaded.model.layers)) - packed)
    page = page_layout(settings.recipe, model.get_head_size(), model.dtype).page_size
    own = str(model.dtype).removeprefix("torch.")
    connector = config.kv_transfer_config and config.kv_transfer_config.kv_connector
    chosen = config.attention_config.backend
    refused = {
        f"skip {outside}: the model has no such layers": bool(outside),
        f"{settings.artifact}: no layer is left to pack": not packed,
        # Left to itself vLLM does as the checkpoint says, by now or when it builds the layers.
        f"the FP8 KV cache that the checkpoint asks for: add {declining(own)}": bool(
            declares_cache(model) and cache.cache_dtype != own
        ),
        f"--kv-cache-dtype {cache.cache_dtype}: the cache is oscarkv's": cache.cache_dtype
        not in ("auto", own),
        f"--block-size {cache.block_size}: pages hold {page} tokens; leave it out": bool(
            cache.user_specified_block_size and cache.block_size != page
        ),
        # Before the next one, which some connectors bring about.
        f"the KV connector {connector}: only {' and '.join(CONNECTORS)} are known to fit": bool(
            connector and connector not in CONNECTORS
        ),
        "--disable-hybrid-kv-cache-manager: windows are a cache group of their own": bool(
            config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        "fold_values and LoRA: adapters expect the model's own values": bool(
            settings.fold_values and config.lora_config
        ),
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "--enable-sleep-mode: oscarkv's tensors would not come back": model.enable_sleep_mode,
        "images whose tokens see each other both ways; for text alone: --language-model-only": (
            model.is_mm_prefix_lm
        ),
        "the canary: it cannot rescore a model with state-space layers": bool(
            model.is_hybrid and settings.canary is not None
        ),
        "--enable-prefix-caching: a model with state-space layers has no prefix cache here": bool(
            model.is_hybrid and cache.enable_prefix_caching
        ),
        f"the KV connector {connector}: it needs the prefix cache, which a model with state-space "
        "layers has not": model.is_hybrid and connector == "SimpleCPUOffloadConnector",
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
    settings = _with_bits_that_fit(config, settings, kept)
    attach.prepare(config, settings)
    logger.info("oscarkv: %s", describe(config, settings))


def _with_bits_that_fit(config: Any, settings: Settings, kept: list[int]) -> Settings:
    """The artifact's bits by layer, where this server can have pages of several sizes; else those
    of the recipe in all layers."""
    connector = config.kv_transfer_config and config.kv_transfer_config.kv_connector
    beside = {
        f"layers {kept}, which keep vLLM's own cache": bool(kept),
        "a canary": settings.canary is not None,
        f"the KV connector {connector}": bool(connector),
    }
    reasons = [what for what, present in beside.items() if present]
    if not settings.loaded.mixed or not reasons:
        return settings
    change(config, uniform=True)
    logger.warning(
        "oscarkv: beside %s all layers are packed with %d bits a key and %d a value: %s gives "
        "some of them more, which makes answers more exact",
        " and ".join(reasons),
        settings.recipe.key_bits,
        settings.recipe.value_bits,
        settings.artifact,
    )
    return dataclasses.replace(settings, uniform=True)


def declares_cache(model: Any) -> bool:
    """Whether a checkpoint says that its KV cache is to be quantised. `model`: ModelConfig."""
    said = model.model_arch_config.quantization_config or {}
    inner = said.get("quantization")  # NVIDIA's Model Optimizer
    parts = [said, inner] if isinstance(inner, dict) else [said]
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    return any(part.get(key) for part in parts for key in keys)


def declining(own: str) -> str:
    """The options that keep a cache in the model's dtype: vLLM knows them for two."""
    if own in ("bfloat16", "float16"):
        return f"--kv-cache-dtype {own}"
    return "--dtype bfloat16 --kv-cache-dtype bfloat16"


def _refuse_bare_backend(config: Any) -> None:
    """Our attention without options would fail in every worker."""
    from oscarkv.integrations.vllm.backend import OscarBackend

    custom = AttentionBackendEnum.CUSTOM
    if config.attention_config.backend is custom and custom.get_class() is OscarBackend:
        raise OscarError(NEEDS_ARTIFACT)


def describe(config: Any, settings: Settings) -> str:
    """What a request of the longest length takes, padding and windows included."""
    model, recipe = config.model_config, settings.recipe
    length = model.max_model_len
    if model.is_hybrid:  # only workers know how large a state is, and so a block
        return f"recipe {recipe.name}, sink {recipe.sink}, recent {recipe.recent}"
    layers, dim = len(settings.loaded.layers), model.get_head_size()
    capacity = Capacity(layers, 1, dim, model.dtype, recipe, length, settings.others)
    return (
        f"recipe {recipe.name}, sink {recipe.sink}, recent {recipe.recent}, pages of "
        f"{capacity.layout.page_size} tokens; at {length:,} tokens {capacity.bits:.2f} bits an "
        f"element are reserved, and memory holds {capacity.gain:.2f}x the tokens of a "
        f"{str(model.dtype).removeprefix('torch.')} cache"
    )


def step_aside(arguments: Any) -> None:
    """Leave a server to vLLM that has `"enabled": false`, or a model without keys and values:
    the backend that was asked for goes too, and vLLM chooses as it would without us. Of one with
    states, only its prefix cache is none of vLLM's. `arguments`: EngineArgs."""
    if switched_off(arguments):
        _leave(arguments)
        logger.info("oscarkv: switched off; the cache is vLLM's own")
    elif settings_of(arguments) is not None:
        model = arguments.create_model_config()
        if model.use_mla:
            change(arguments, enabled=False)
            _leave(arguments)
            logger.warning(
                "oscarkv: nothing is packed, and the artifact is not used: all attention layers of "
                "%s are MLA, which caches one latent a token instead of keys and values, and keep "
                "vLLM's own cache",
                model.model,
            )
        elif model.is_hybrid and arguments.enable_prefix_caching is None:
            arguments.enable_prefix_caching = False
            logger.info("oscarkv: no prefix caching, since %s has state-space layers", model.model)


def _leave(arguments: Any) -> None:
    for holder, name in ((arguments, "attention_backend"), (arguments.attention_config, "backend")):
        chosen = getattr(holder, name)
        if getattr(chosen, "name", chosen) == AttentionBackendEnum.CUSTOM.name:
            setattr(holder, name, None)


def check_layers(settings: Settings, specs: dict[str, Any], groups: list[Any]) -> str | None:
    """Which layers keep vLLM's own cache, as a line for the log; refuses a model of no others.

    `specs`: layer name -> KVCacheSpec as the workers made them; `groups`: those vLLM put them in.
    """
    kept: dict[str, list[int]] = {}
    for name, spec in specs.items():
        if name.endswith(SUFFIX) or name + SUFFIX in specs:
            continue
        index = extract_layer_index(name)
        if isinstance(spec, MambaSpec):
            reason = "state-space"
        elif index in settings.skip:
            reason = "skipped"
        elif isinstance(spec, SlidingWindowSpec):
            reason = "sliding window"
        elif index not in settings.loaded.layers:
            reason = "no transforms"
        else:
            reason = "attention of another kind"
        kept.setdefault(reason, []).append(index)
    parts = [f"{', '.join(map(str, sorted(found)))} ({why})" for why, found in kept.items()]
    line = f"layers {'; '.join(parts)} keep vLLM's own cache" if kept else None
    of_groups = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in groups]
    windows = [spec for spec in of_groups if isinstance(spec, WindowSpec)]
    if not windows:
        raise OscarError(f"oscarkv has nothing to pack: {line}")
    if settings.loaded.mixed and line:
        raise OscarError(
            "oscarkv cannot give layers of this model different bits, as its artifact says, since "
            f'{line}; add "uniform": true to the options'
        )
    (pages,) = {spec.block_size // PAGE_QUANTUM for spec in windows}
    if pages == 1:
        return line
    padded = any(spec.page_size_padded for spec in windows)
    if padded or not any(isinstance(spec, MambaSpec) for spec in specs.values()):
        raise OscarError(f"oscarkv cannot be used with this model: blocks are larger where {line}")
    return (
        f"{line}; a state takes {pages} pages, so blocks hold {pages * windows[0].hit_alignment} "
        f"packed or {pages * PAGE_QUANTUM} exact tokens"
    )


def check_memory(config: Any, cache: Any) -> None:
    """Refuse a pool in which a prompt of the longest length would wait forever: while it is read it
    holds more window blocks than vLLM charges it for (see `WindowBlocks`). `cache`: KVCacheConfig.
    """
    specs = [next(iter(iter_layer_specs(g.kv_cache_spec))) for g in cache.kv_cache_groups]

    def needed(length: int) -> int:
        return sum(most_blocks(spec, length, config) for spec in specs)

    length, usable = config.model_config.max_model_len, cache.num_blocks - 1  # one is never used
    if needed(length) <= usable:
        return
    fits = bisect.bisect_right(range(1, length + 1), usable, key=needed)
    instead = f"--max-model-len {fits}" if fits else "a model of which one token fits"
    raise OscarError(
        f"too little memory for one sequence of {length:,} tokens: it takes {needed(length)} "
        f"blocks while its prompt is read, and the cache has {usable}; give more memory "
        f"(--gpu-memory-utilization), or {instead}"
    )


def most_blocks(spec: Any, length: int, config: Any) -> int:
    """What one request of a group takes at most. `config`: VllmConfig."""
    if hasattr(spec, "max_admission_blocks_per_request"):  # windows
        return int(spec.max_admission_blocks_per_request(config.max_in_flight_tokens, length))
    if isinstance(spec, MambaSpec):  # the same at every length
        return blocks_for(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
    return blocks_for(length, spec.block_size)
