"""Puts the two ends in place: a method on the workers, a look at finished requests."""

from __future__ import annotations

import functools
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.integrations.vllm.canary.options import LEAST, CanaryOptions
from oscarkv.integrations.vllm.settings import Settings, settings_of

WORKER = "oscarkv.integrations.vllm.canary.worker.CanaryWorker"


def prepare(config: Any, settings: Settings) -> None:
    """Give the workers of this VllmConfig their method; refuse what cannot be rescored."""
    options = CanaryOptions.of(settings.canary)
    if options is None:
        return
    parallel, extension = config.parallel_config, config.parallel_config.worker_extension_cls
    refused = {
        f"--worker-extension-cls {extension}: the canary is one": extension not in ("", WORKER),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "--enable-lora": config.lora_config is not None,
        "multimodal models": config.model_config.is_multimodal_model,
    }
    for what, present in refused.items():
        if present:
            raise OscarError(f"oscarkv's canary cannot be used with {what}")
    _require_room(options.max_tokens, config.scheduler_config.max_num_batched_tokens, settings)
    parallel.worker_extension_cls = WORKER


def _require_room(most: int, step: int, settings: Settings) -> None:
    """Refuse limits below what `Watch` asks of a request: it would never measure anything."""
    sink, recent = settings.recipe.sink, settings.recipe.recent
    needed = sink + recent + LEAST
    if min(most, step) < needed:
        raise OscarError(
            f"oscarkv's canary would never rescore a request: it needs {needed} tokens (sink "
            f"{sink}, recent {recent}, and {LEAST} more), and may read {min(most, step)} "
            f"(max_tokens {most}, --max-num-batched-tokens {step})"
        )


def install() -> None:
    """Have every AsyncLLM, which is what serves, show us the requests that finish: vLLM has no
    hook that sees their tokens."""
    from vllm.v1.engine.async_llm import AsyncLLM

    plain = AsyncLLM.__init__
    if getattr(plain, "_oscarkv", False):
        return

    @functools.wraps(plain)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        settings = settings_of(self.vllm_config)
        wanted = CanaryOptions.of(settings.canary) if settings is not None else None
        if settings is not None and wanted is not None:
            _watch(self, settings, wanted)

    __init__._oscarkv = True  # type: ignore[attr-defined]
    AsyncLLM.__init__ = __init__


def _watch(engine: Any, settings: Settings, options: CanaryOptions) -> None:
    from oscarkv.integrations.vllm.canary.watch import Watch

    watch, processor = Watch(engine, settings, options), engine.output_processor
    finish = processor._finish_request

    def _finish_request(request: Any) -> None:
        finish(request)
        watch.finished(request)

    processor._finish_request = _finish_request
