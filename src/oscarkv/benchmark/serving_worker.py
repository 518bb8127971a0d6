"""One engine of `oscarkv bench serving`, in a process of its own, so that its memory goes with it.

    python -m oscarkv.benchmark.serving_worker PLAN

PLAN is an `EnginePlan` as JSON. Every figure is printed as soon as it is there, as one line of
JSON behind a mark.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from oscarkv.benchmark.serving_plan import (
    MARK,
    OURS,
    REAL,
    SGLANG,
    WARM_TOKENS,
    EnginePlan,
    Load,
    Shape,
)
from oscarkv.integrations.vllm.proof import implementations, require_plugin


class DoesNotFit(Exception):
    """The cache holds fewer requests at once than were asked for."""


def main() -> None:
    plan = EnginePlan.from_json(sys.argv[1])
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        _run(plan)
    except Exception as error:
        traceback.print_exc()
        emit("failed", reason=one_line(error))
        sys.exit(1)


def _end_with_the_parent() -> None:
    """A benchmark that is killed must not leave engines behind that hold the GPU: the parent never
    writes here, and the pipe ends with it."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def emit(event: str, **figures: Any) -> None:
    print(MARK + json.dumps({"event": event, **figures}), flush=True)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _run(plan: EnginePlan) -> None:
    begin = time.perf_counter()
    driver: Any
    if plan.kind == SGLANG:
        from oscarkv.benchmark import serving_sglang

        driver, about = serving_sglang.start(plan)
    else:
        driver, about = start(plan)
    emit("started", seconds=time.perf_counter() - begin, **about)
    driver.warm_up()
    with driver.contexts(plan.step_contexts):
        for shape in plan.shapes:
            what = {**vars(shape), "contexts": plan.step_contexts}
            measure("steps", what, plan.repeats, partial(driver.step_time, shape))
    for contexts in plan.load_contexts:
        with driver.contexts(contexts):
            if contexts == REAL:
                for length in plan.prompts:
                    once = partial(driver.first_token, length)
                    measure("first_token", {"context": length}, plan.repeats, once)
            if plan.load is not None:
                emit("load", contexts=contexts, **vars(plan.load), **driver.serve(plan.load))
    emit("done")


def start(plan: EnginePlan) -> tuple[Any, dict[str, Any]]:
    """vLLM, and what it says of itself."""
    from vllm import LLM

    llm = LLM(plan.model, **plan.engine)
    config = llm.llm_engine.vllm_config
    attention = implementations(config)
    if plan.name == OURS:
        require_plugin(attention)
    about = {
        "attention": attention,
        "kv_tokens": config.cache_config.kv_cache_size_tokens,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "concurrency": config.cache_config.kv_cache_max_concurrency,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": config.device_config.device_type,
    }
    return Driver(llm.llm_engine, plan, config.cache_config.kv_cache_size_tokens), about


def measure(event: str, what: dict[str, Any], repeats: int, once: Callable[[], float]) -> None:
    """A case that fails says so, and the next one can still be measured."""
    try:
        times = [once() for _ in range(repeats)]
    except DoesNotFit as error:
        emit(event, **what, status="skipped", reason=str(error))
    else:
        emit(event, **what, status="measured", seconds=statistics.median(times), all=times)


class Driver:
    """Requests through `LLMEngine`, a step at a time, with a clock beside it."""

    def __init__(self, engine: Any, plan: EnginePlan, capacity: int) -> None:
        self.engine, self.plan, self.capacity = engine, plan, capacity
        self._made = 0
        self._rng = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        """Fresh tokens every time, so that nothing is found in a cache."""
        return self._rng.choices(range(3, self.plan.vocabulary), k=length)

    def submit(self, tokens: list[int], new: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"bench-{self._made}"
        self._made += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    @property
    def scheduler(self) -> Any:
        """In this process: the parent saw to that."""
        return self.engine.engine_core.engine_core.scheduler

    @contextmanager
    def contexts(self, wanted: str) -> Iterator[None]:
        """With real contexts the connector that marks them as computed finds none to mark."""
        if wanted != REAL or not self.plan.connector:
            yield
            return
        connector = self.scheduler.connector.connector_scheduler
        connector.get_num_new_matched_tokens = lambda *_: (0, False)
        try:
            yield
        finally:
            del connector.get_num_new_matched_tokens

    @contextmanager
    def preemptions(self) -> Iterator[list[str]]:
        """Requests that lose their place meanwhile: they are read again, which takes time."""
        found: list[str] = []
        plain = self.scheduler._preempt_request

        def count(request: Any, *arguments: Any, **options: Any) -> Any:
            found.append(request.request_id)
            return plain(request, *arguments, **options)

        self.scheduler._preempt_request = count
        try:
            yield found
        finally:
            del self.scheduler._preempt_request

    def warm_up(self) -> None:
        """Kernels are compiled and graphs captured at their first use."""
        new = min(4, self.plan.longest - 1)
        length = min(64, self.plan.longest - new)
        for batch in sorted({shape.batch for shape in self.plan.shapes} | {1}):
            for _ in range(batch):
                self.submit(self.prompt(length), new)
            self.drain()

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def step_time(self, shape: Shape) -> float:
        """Seconds a step while all requests decode."""
        room = self.plan.room(shape)
        asked = shape.batch * (shape.context + room)
        if asked > self.capacity:
            raise DoesNotFit(f"{asked:,} tokens at once, and the cache holds {self.capacity:,}")
        made = {self.submit(self.prompt(shape.context), room): 0 for _ in range(shape.batch)}
        begin, first = None, 0
        try:
            while True:
                finished = False
                for output in self.engine.step():
                    made[output.request_id] += len(output.outputs[0].token_ids)
                    finished |= output.finished
                now, least = time.perf_counter(), min(made.values())
                if begin is None and least >= WARM_TOKENS:
                    begin, first = now, least
                elif begin is not None and least >= first + self.plan.steps:
                    return (now - begin) / (least - first)
                if finished:
                    raise DoesNotFit(
                        f"{shape.batch} requests of {shape.context:,} never ran at once"
                    )
        finally:
            self.engine.abort_request(list(made))
            self.drain()

    def first_token(self, length: int) -> float:
        tokens = self.prompt(length)
        begin = time.perf_counter()
        self.submit(tokens, 1)
        self.drain()
        return time.perf_counter() - begin

    def serve(self, load: Load) -> dict[str, Any]:
        """All requests at once; the engine runs as many of them together as it can hold."""
        prompts = [self.prompt(load.context) for _ in range(load.requests)]
        with self.preemptions() as preempted:
            begin, most = time.perf_counter(), 0
            times: dict[str, list[float]] = {
                self.submit(prompt, load.new_tokens): [] for prompt in prompts
            }
            while self.engine.has_unfinished_requests():
                outputs, now = self.engine.step(), time.perf_counter()
                most = max(most, len(outputs))
                for output in outputs:
                    times[output.request_id] += [now] * len(output.outputs[0].token_ids)
        end = time.perf_counter()
        gaps = [b - a for row in times.values() for a, b in pairwise(row)]
        tokens = sum(map(len, times.values()))
        return {
            "seconds": end - begin,
            "tokens": tokens,
            "tokens_per_s": tokens / (end - begin),
            "requests_per_s": load.requests / (end - begin),
            "most_at_once": most,
            "preemptions": len(preempted),
            "first_token_s": spread([row[0] - begin for row in times.values() if row]),
            "between_tokens_s": spread(gaps),
        }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


if __name__ == "__main__":
    main()
