"""Where the plugin takes part in vLLM's start and vLLM offers no hook: functions wrapped, once.

Nothing here changes a server that does not ask for oscarkv.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.integrations.serving import refusal
from oscarkv.integrations.vllm.settings import settings_of


def install() -> None:
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    from vllm.model_executor.model_loader import base_loader
    from vllm.platforms import current_platform
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    from oscarkv.integrations.vllm.check import check_config, step_aside

    _around_arguments(step_aside, check_config)
    _wrap(vllm.v1.engine.core, "get_kv_cache_configs", _checked_memory)
    _wrap(vllm.v1.engine.utils, "wait_for_engine_startup", _with_reason)
    _wrap(base_loader.BaseModelLoader, "load_model", _checked_weights)
    _wrap(base_loader, "process_weights_after_loading", _folded_weights)
    _wrap(current_platform, "update_block_size_for_backend", _aligned_states)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _wrap(CPUModelRunner, "_zero_block_ids", _zeroed_blocks)
    _wrap(SimpleCPUOffloadScheduler, "get_num_new_matched_tokens", _matched_in_memory)
    WorkerProc.wait_for_ready = staticmethod(_around(WorkerProc.wait_for_ready, _without_trace))
    refusal.print_refusals_as_lines()


def install_version_refusal(error: OscarError) -> None:
    """For a vLLM whose interfaces are unknown: stop servers that ask for oscarkv, no others."""

    def refuse(config: Any) -> None:
        if settings_of(config) is not None:
            raise error

    _around_arguments(lambda _: None, refuse)
    refusal.print_refusals_as_lines()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of around(plain, ...)."""
    setattr(owner, name, _around(getattr(owner, name), around))


def _around(plain: Any, around: Callable[..., Any]) -> Any:
    if getattr(plain, "_oscarkv", False):
        return plain

    @functools.wraps(plain)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(plain, *arguments, **options)

    wrapped._oscarkv = True  # type: ignore[attr-defined]
    return wrapped


def _around_arguments(before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """In the process that starts the server: `before` sees its EngineArgs, `after` the VllmConfig
    that vLLM makes of them."""
    from vllm.engine.arg_utils import EngineArgs

    def checked(plain: Any, arguments: Any, *rest: Any, **options: Any) -> Any:
        before(arguments)
        config = plain(arguments, *rest, **options)
        after(config)
        if settings_of(config) is not None:
            refusal.listen()
        return config

    _wrap(EngineArgs, "create_engine_config", checked)


def _checked_memory(plain: Any, config: Any, specs: Any, memory: Any) -> Any:
    """In the engine's process, once the memory left by the model is known."""
    from oscarkv.integrations.vllm.check import check_layers, check_memory, logger

    settings = settings_of(config)
    if settings is None:
        return plain(config, specs, memory)
    try:
        made = plain(config, specs, memory)
        every = {name: spec for rank in specs for name, spec in rank.items()}
        groups = [group for cache in made for group in cache.kv_cache_groups]
        kept = check_layers(settings, every, groups)
        if kept is not None:
            logger.info("oscarkv: %s", kept)
        for cache in made:
            check_memory(config, cache)
    except ValueError as error:  # vLLM's own: not even one sequence fits
        refusal.refuse(OscarError(" ".join(str(error).split())))
    except OscarError as error:
        refusal.refuse(error)
    return made


def _with_reason(plain: Any, *arguments: Any, **options: Any) -> Any:
    """In the process that starts the server, when another one fails."""
    try:
        return plain(*arguments, **options)
    except RuntimeError:
        reason = refusal.heard()
        if reason is None:
            raise
        raise reason from None


def _checked_weights(
    plain: Any, loader: Any, vllm_config: Any, model_config: Any, *rest: Any, **options: Any
) -> Any:
    """In every worker, as it loads the model. Drafts are models of their own."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from oscarkv.integrations.serving.weights import check_weights

    settings = settings_of(vllm_config)
    dummy = vllm_config.load_config.load_format == "dummy"
    try:
        model = plain(loader, vllm_config, model_config, *rest, **options)
        if settings is not None and model_config is vllm_config.model_config and not dummy:
            widths = {model_config.get_hidden_size(), model_config.get_head_size()}
            check_weights(
                settings.loaded,
                model,
                model_config.model,
                VocabParallelEmbedding,
                widths,
                split=(MambaBase,),
            )
    except OscarError as error:
        refusal.refuse(error)
    return model


def _folded_weights(plain: Any, model: Any, *rest: Any, **options: Any) -> Any:
    """In every worker, as long as weights are as they were loaded."""
    from oscarkv.integrations.vllm import layers

    settings = layers.current()
    if settings is not None and settings.fold_values:
        from oscarkv.integrations.vllm.fold import fold_model

        fold_model(model, settings)
    return plain(model, *rest, **options)


def _aligned_states(plain: Any, config: Any) -> None:
    """In every worker, once it has loaded the model."""
    from oscarkv.integrations.vllm.states import align_states

    plain(config)
    if settings_of(config) is not None:
        align_states(config)


def _zeroed_blocks(plain: Any, runner: Any, block_ids: Any) -> None:
    """vLLM's CPU runner takes each page of a layer for a block."""
    from oscarkv.integrations.vllm.cpu import zero_blocks

    if settings_of(runner.vllm_config) is None:
        plain(runner, block_ids)
    else:
        zero_blocks(runner, block_ids)


def _matched_in_memory(plain: Any, offloaded: Any, request: Any, computed: int) -> Any:
    """Of a prompt that the GPU holds the beginning of, vLLM looks up the rest alone. Windows are
    found by position, so the whole is looked up, and what the GPU holds is left out again."""
    if not computed or settings_of(offloaded.vllm_config) is None:
        return plain(offloaded, request, computed)
    answer = plain(offloaded, request, 0)
    pending = offloaded._pending_cpu_hits.pop(request.request_id, None)
    if pending is None:
        return answer
    blocks, length, _ = pending
    answer = 0, False
    if length > computed and computed % offloaded.block_size == 0:
        rest = tuple(
            group[computed // size :]
            for group, size in zip(blocks, offloaded.group_block_sizes, strict=True)
        )
        offloaded.cpu_block_pool.touch([b for group in rest for b in group if not b.is_null])
        offloaded._pending_cpu_hits[request.request_id] = rest, length - computed, computed
        answer = length - computed, True
    offloaded._free_pending_cpu_hit(pending)
    return answer


def _without_trace(plain: Any, *arguments: Any, **options: Any) -> Any:
    """In the engine's process, when a worker fails: if it refused, all has been said."""
    try:
        return plain(*arguments, **options)
    except Exception:
        if refusal.heard() is None:
            raise
        raise SystemExit(1) from None
