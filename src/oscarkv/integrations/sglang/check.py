"""Checks of a server: its configuration before any worker starts, its parts when they are made."""

from __future__ import annotations

import logging
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.integrations.serving import refusal
from oscarkv.integrations.serving.layers import check_identity
from oscarkv.integrations.serving.settings import Settings
from oscarkv.integrations.sglang import fork, options
from oscarkv.integrations.sglang.capacity import Capacity

logger = logging.getLogger("sglang.oscarkv")  # below "sglang", whose handlers print


def check_config(server_args: Any) -> None:
    """Refuse what cannot work, in one line; settle what follows from the rest."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    for line in fork.advice():
        logger.warning(line)
    settings = options.settings_of(server_args)
    if settings is None:
        return
    config, model = resolving_view(server_args), model_config_of(server_args)
    check_model(settings, model)
    page = capacity_of(settings, model).layout.page_size
    for what, present in _refused(server_args, config, model, settings, page).items():
        if present:
            raise OscarError(f"oscarkv cannot be used with {what}")
    graphs = with_phase(config.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    if settings.backend == "torch" or config.device == "cpu":  # it waits for the device
        graphs = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    declare_resolution(
        server_args,
        "oscarkv",
        attention_backend=options.NAME,
        radix_cache_backend=options.NAME,
        page_size=page,
        cuda_graph_config=graphs,
    )
    refusal.listen()
    logger.info("oscarkv: %s", describe(model, settings))


def check_model(settings: Settings, model: Any) -> None:
    """Refuse an artifact of another model. `model`: SGLang's ModelConfig."""
    text = model.hf_text_config
    found = {
        "layers": text.num_hidden_layers,
        "query_heads": text.num_attention_heads,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.head_dim,
    }
    check_identity(settings.loaded, model.model_path, found, getattr(text, "rope_parameters", None))


def _refused(raw: Any, config: Any, model: Any, settings: Settings, page: int) -> dict[str, bool]:
    artifact = settings.loaded
    missing = sorted(set(range(artifact.model.layers)) - set(artifact.layers))
    backends = (raw.attention_backend, raw.prefill_attention_backend, raw.decode_attention_backend)
    others = [name for name in backends if name not in (None, options.NAME)]
    both = raw.attention_backend or (raw.prefill_attention_backend and raw.decode_attention_backend)
    return {
        f"{settings.artifact}: layers {missing} have no transforms": bool(missing),
        f"recipe {settings.recipe.name!r}: it packs nothing": settings.recipe.exact,
        f"{' and '.join(others) or 'no attention'} beside it: say --attention-backend oscarkv": (
            bool(others or not both)
        ),
        "MLA: its cache is one latent a token, not keys and values": (
            model.attention_arch.name == "MLA"
        ),
        "sliding windows: all layers must attend to everything": bool(model.is_hybrid_swa),
        "models with an encoder": bool(model.is_encoder_decoder),
        f"--kv-cache-dtype {config.kv_cache_dtype}: the cache is oscarkv's": (
            config.kv_cache_dtype != "auto"
        ),
        f"--page-size {raw.page_size}: pages hold {page} tokens; leave it out": (
            raw.page_size not in (None, page)
        ),
        f"--radix-cache-backend {raw.radix_cache_backend}: the radix cache is oscarkv's": (
            raw.radix_cache_backend not in (None, options.NAME)
        ),
        f"--speculative-algorithm {raw.speculative_algorithm}": bool(raw.speculative_algorithm),
        "--enable-hierarchical-cache": raw.enable_hierarchical_cache,
        "--enable-lmcache": raw.enable_lmcache,
        "--enable-flexkv": raw.enable_flexkv,
        "--enable-hisparse": raw.enable_hisparse,
        "--enable-unified-memory": raw.enable_unified_memory,
        "--enable-unified-cache-external-linker": raw.enable_unified_cache_external_linker,
        "--enable-page-major-kv-layout": raw.enable_page_major_kv_layout,
        "--enable-kv-cache-sharding": raw.enable_kv_cache_sharding,
        "--enable-streaming-session": raw.enable_streaming_session,
        "--enable-session-radix-cache": raw.enable_session_radix_cache,
        "--enable-two-batch-overlap: a step is planned once for all layers": (
            raw.enable_two_batch_overlap
        ),
        # It may evict the windows of a hit that is admitted in the same step.
        "preemption by priority: add --disable-priority-preemption": (
            raw.enable_priority_scheduling and not raw.disable_priority_preemption
        ),
        "--prefill-only-disable-kv-cache": raw.prefill_only_disable_kv_cache,
        f"--disaggregation-mode {raw.disaggregation_mode}": raw.disaggregation_mode != "null",
        f"--dllm-algorithm {raw.dllm_algorithm}": raw.dllm_algorithm is not None,
        "context parallelism": (
            raw.dcp_size > 1 or raw.attn_cp_size > 1 or bool(raw.enable_prefill_cp)
        ),
        "pipeline parallelism": raw.pp_size > 1,
    }


def describe(model: Any, settings: Settings) -> str:
    """What a request of the longest length takes, padding and windows included."""
    recipe, length, capacity = settings.recipe, model.context_len, capacity_of(settings, model)
    return (
        f"recipe {recipe.name}, sink {recipe.sink}, recent {recipe.recent}, pages of "
        f"{capacity.layout.page_size} tokens; at {length:,} tokens {capacity.bits:.2f} bits an "
        f"element are reserved, and memory holds {capacity.gain:.2f}x the tokens of a "
        f"{str(model.dtype).removeprefix('torch.')} cache"
    )


def capacity_of(settings: Settings, model: Any) -> Capacity:
    """Of one KV head."""
    layers, length = len(settings.loaded.layers), model.context_len
    recipe, others = settings.recipe, settings.others
    return Capacity(layers, 1, model.head_dim, model.dtype, recipe, length, others)


def check_memory(pool: Any) -> None:
    """Refuse a pool that would never admit a request of the longest length."""
    from oscarkv.integrations.serving.windows import blocks_for

    rule, length = pool.rule, pool.capacity.max_model_len
    pages = pool.size // rule.page + pool.window_pages

    def fits(tokens: int) -> bool:  # as SGLang asks: a page more than it takes, and one left over
        return blocks_for(tokens, rule.page) + rule.at_prefill(tokens) + 2 <= pages

    if fits(length):
        return
    longest = max((n for n in range(rule.page, length, rule.page) if fits(n)), default=0)
    instead = f"--context-length {longest}" if longest else "a larger --mem-fraction-static"
    raise OscarError(
        f"too little memory for one sequence of {length:,} tokens: the cache has {pages} pages of "
        f"{rule.page} tokens; give more memory (--mem-fraction-static, --max-total-tokens), or "
        f"{instead}"
    )


def verify(runner: Any) -> None:
    """SGLang only logs a plugin's failures. `runner`: ModelRunner, when it makes its attention."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_memory

    from oscarkv.integrations.sglang.allocator import OscarAllocator
    from oscarkv.integrations.sglang.hooks import HOOKS
    from oscarkv.integrations.sglang.pool import OscarPool

    wrong = [f"{target} was not reached" for target in HOOKS if target not in HookRegistry._patched]
    allocator = runner.token_to_kv_pool_allocator
    wrong += [] if isinstance(runner.token_to_kv_pool, OscarPool) else ["the cache is SGLang's"]
    wrong += [] if isinstance(allocator, OscarAllocator) else ["the allocator is SGLang's"]
    name = get_memory().radix_cache_backend
    wrong += [] if name == options.NAME else [f"the radix cache is {name or 'SGLang'}'s"]
    if wrong:
        raise OscarError(f"oscarkv's plugin did not take effect: {'; '.join(wrong)}")
