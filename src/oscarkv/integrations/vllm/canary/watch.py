"""The API server's end: which finished requests are rescored, and when."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from typing import Any

from vllm.logger import init_logger

from oscarkv.integrations.vllm.canary.options import LEAST, CanaryOptions
from oscarkv.integrations.vllm.canary.report import Report, Score
from oscarkv.integrations.vllm.settings import Settings

logger = init_logger("vllm.oscarkv")

#: Seconds between two looks whether the engine is idle.
POLL = 0.1


class Watch:
    """Of one AsyncLLM. One request is rescored at a time; those chosen meanwhile are let go."""

    def __init__(self, engine: Any, settings: Settings, options: CanaryOptions) -> None:
        config = engine.vllm_config
        self.options = options
        self._engine = weakref.ref(engine)  # which ends when nobody else holds it
        self._report = Report(options, config.model_config.served_model_name)
        self._chooser = random.Random()
        self._windows = settings.recipe.sink + settings.recipe.recent
        # A step's worth: what vLLM kept memory for.
        self._most = min(options.max_tokens, config.scheduler_config.max_num_batched_tokens)
        self._task: asyncio.Task[None] | None = None
        self._last = float("-inf")
        self._failed = False

    def finished(self, request: Any) -> None:
        """Called for every finished request (vLLM's RequestState): cheap."""
        if self._failed or (self._task is not None and not self._task.done()):
            return
        if self._chooser.random() >= self.options.share:
            return
        try:
            tokens = tokens_of(request)[: self._most]
            if len(tokens) >= self._windows + LEAST:
                self._task = asyncio.get_running_loop().create_task(self._rescore(tokens))
        except Exception as error:
            self._stop(error)

    async def _rescore(self, tokens: list[int]) -> None:
        try:
            await self._wait()
            engine = self._engine()
            if engine is None or await engine.is_sleeping():
                return
            ranks = await engine.collective_rpc("oscarkv_rescore", args=(tokens,))
            for rank in ranks:
                if "error" in rank:
                    raise RuntimeError(rank["error"])
            self._report.add(Score.of_ranks(ranks))
        except Exception as error:
            self._stop(error)
        finally:
            self._last = time.monotonic()

    def _stop(self, error: Exception) -> None:
        """Whatever goes wrong here must not touch what is served."""
        self._failed = True
        logger.warning("oscarkv canary: stops, since rescoring failed: %s", error)

    async def _wait(self) -> None:
        """Until `interval` after the last one; then for an idle moment, but no longer than that
        again."""
        await asyncio.sleep(max(0.0, self._last + self.options.interval - time.monotonic()))
        patience = time.monotonic() + self.options.interval
        while self._busy() and time.monotonic() < patience:
            await asyncio.sleep(POLL)

    def _busy(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.output_processor.has_unfinished_requests()


def tokens_of(request: Any) -> list[int]:
    """Prompt and answer; nothing where the prompt is not tokens."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return []
    if request.detokenizer is None:  # pooling
        return []
    return [*request.prompt_token_ids, *request.detokenizer.output_token_ids]
