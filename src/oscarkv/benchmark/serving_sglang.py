"""SGLang in `oscarkv bench serving`: requests through its `Engine`, tokens timed as they arrive."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from oscarkv.benchmark.serving_plan import COMPUTED, WARM_TOKENS, EnginePlan, Load, Shape
from oscarkv.benchmark.serving_worker import DoesNotFit, spread


def start(plan: EnginePlan) -> tuple[Driver, dict[str, Any]]:
    """The engine, and what it says of itself."""
    from sglang.srt.entrypoints.engine import Engine

    computed = multiprocessing.get_context("spawn").Value("b", False)

    if plan.connector:
        Engine.run_scheduler_process_func = staticmethod(partial(run_scheduler, computed))
    engine = Engine(model_path=plan.model, **plan.engine)
    facts = engine._scheduler_init_result.scheduler_infos[0]
    config = engine.server_args.resolved_dict()
    about = {
        "attention": [config["attention_backend"]],
        "kv_tokens": facts["max_total_num_tokens"],
        "concurrency": facts["max_total_num_tokens"] / config["context_length"],
        "max_model_len": config["context_length"],
        "dtype": config["dtype"],
        "device": config["device"],
    }
    return Driver(engine, plan, facts["max_total_num_tokens"], computed), about


def run_scheduler(computed: Any, *arguments: Any, **named: Any) -> None:
    """SGLang's scheduler in its own process. While `computed` is set, prompts are scheduled and
    given their memory as always, but not read: what their pages hold is what decoding gets."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

    read = ModelRunner._forward_raw

    def forward(self: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        if not computed.value or not batch.forward_mode.is_extend():
            return read(self, batch, *rest, **more)
        shape = batch.batch_size, self.model_config.vocab_size
        logits = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return ModelRunnerOutput(LogitsProcessorOutput(logits), can_run_graph=False)

    ModelRunner._forward_raw = forward
    run_scheduler_process(*arguments, **named)


class Driver:
    """Every request is streamed, and each of its tokens has a time."""

    def __init__(self, engine: Any, plan: EnginePlan, capacity: int, computed: Any) -> None:
        self.engine, self.plan, self.capacity = engine, plan, capacity
        self._computed = computed  # shared with the scheduler's process
        self._rng = random.Random(0)

    @contextmanager
    def contexts(self, wanted: str) -> Iterator[None]:
        """Whether prompts are read meanwhile."""
        self._computed.value = wanted == COMPUTED
        try:
            yield
        finally:
            self._computed.value = False

    def prompt(self, length: int) -> list[int]:
        """Fresh tokens every time, so that nothing is found in a cache."""
        return self._rng.choices(range(3, self.plan.vocabulary), k=length)

    def _all(self, prompts: list[list[int]], new: int) -> tuple[list[list[float]], int]:
        """Times of all tokens of requests that arrive at once, and how often one was retracted."""
        return self.engine.loop.run_until_complete(self._gather(prompts, new))

    async def _gather(self, prompts: list[list[int]], new: int) -> tuple[list[list[float]], int]:
        answers = await asyncio.gather(*(self._one(prompt, new) for prompt in prompts))
        return [times for times, _ in answers], sum(count for _, count in answers)

    async def _one(self, prompt: list[int], new: int) -> tuple[list[float], int]:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        times: list[float] = []
        retracted = 0
        async for part in await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True
        ):
            facts, now = part["meta_info"], time.perf_counter()
            times += [now] * (facts["completion_tokens"] - len(times))
            retracted = facts.get("num_retractions") or 0
        return times, retracted

    def warm_up(self) -> None:
        """Kernels are compiled and graphs captured at their first use."""
        new = min(4, self.plan.longest - 1)
        length = min(64, self.plan.longest - new)
        for batch in sorted({shape.batch for shape in self.plan.shapes} | {1}):
            self._all([self.prompt(length) for _ in range(batch)], new)

    def step_time(self, shape: Shape) -> float:
        """Seconds a step while all requests decode: between the last request's 8th token and the
        first one's end, as far as they ran together."""
        room = self.plan.room(shape)
        asked = shape.batch * (shape.context + room)
        if asked > self.capacity:
            raise DoesNotFit(f"{asked:,} tokens at once, and the cache holds {self.capacity:,}")
        made, _ = self._all([self.prompt(shape.context) for _ in range(shape.batch)], room)
        begin, end = max(times[WARM_TOKENS - 1] for times in made), min(row[-1] for row in made)
        slowest = max(made, key=lambda times: times[WARM_TOKENS - 1])
        steps = [moment for moment in slowest if begin <= moment <= end]
        if len(steps) <= self.plan.steps:
            raise DoesNotFit(f"{shape.batch} requests of {shape.context:,} never ran at once")
        return (steps[self.plan.steps] - steps[0]) / self.plan.steps

    def first_token(self, length: int) -> float:
        prompt = self.prompt(length)
        begin = time.perf_counter()
        (times,), _ = self._all([prompt], 1)
        return times[0] - begin

    def serve(self, load: Load) -> dict[str, Any]:
        """All requests at once; the engine runs as many of them together as it can hold."""
        prompts = [self.prompt(load.context) for _ in range(load.requests)]
        begin = time.perf_counter()
        made, retracted = self._all(prompts, load.new_tokens)
        end = max(times[-1] for times in made)
        tokens = sum(map(len, made))
        return {
            "seconds": end - begin,
            "tokens": tokens,
            "tokens_per_s": tokens / (end - begin),
            "requests_per_s": load.requests / (end - begin),
            "most_at_once": _most_at_once(made),
            "preemptions": retracted,
            "first_token_s": spread([times[0] - begin for times in made]),
            "between_tokens_s": spread([b - a for times in made for a, b in pairwise(times)]),
        }


def _most_at_once(made: list[list[float]]) -> int:
    """Requests between their first and last token at the same time."""
    return max(sum(row[0] <= times[0] <= row[-1] for row in made) for times in made)
