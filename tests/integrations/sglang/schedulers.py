"""SGLang's scheduler in this process, one at a time: requests go in and tokens come out, a step at
a time, and its books lie open."""

from __future__ import annotations

import itertools
import os
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # else SIGILL where AMX is barred
#: SGLang counts its pages after every step, and complains.
os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
os.environ.setdefault("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")

#: Whatever the CPU engine needs, with oscarkv or without.
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "log_level": "error",
    "random_seed": 0,
    "context_length": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 2048,
    "max_total_tokens": 16384,
}


#: SGLang's own choice follows `random_seed`, so two workers of pytest would choose the same ones.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.cycle(range(20000 + 500 * _WORKER, 20500 + 500 * _WORKER))


def free_port() -> int:
    """One that no other worker takes, below those of outgoing connections."""
    for port in itertools.islice(_ports, 500):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


@contextmanager
def engine(model: Any, options: dict[str, Any] | None = None, **knobs: Any) -> Iterator[Engine]:
    """An engine with oscarkv's options, or a stock one for None. `model` has a path and an
    artifact."""
    knobs = KNOBS | {"model_path": str(model.path), "nccl_port": free_port()} | knobs
    if options is None:
        knobs.setdefault("attention_backend", "torch_native")
    else:
        knobs["attention_backend"] = "oscarkv"
        knobs["oscarkv_artifact"] = str(model.artifact)
        knobs |= {f"oscarkv_{name}": value for name, value in options.items()}
    made = Engine(knobs)
    try:
        yield made
    finally:
        made.close()


class Engine:
    def __init__(self, knobs: dict[str, Any]) -> None:
        import zmq
        from sglang.srt.entrypoints.engine import Engine as Stock
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs

        # A scheduler that goes would wait for somebody to hear its last messages.
        zmq.Context.__del__ = lambda self: None
        load_plugins()
        self.arguments = Stock.server_args_class(**knobs)
        self.arguments.resolve_once()
        self.arguments.check_server_args()
        from sglang.srt.managers.scheduler import Scheduler, SpawnRanks

        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        publish(self.arguments, role="scheduler", ranks=ranks)
        self.scheduler: Any = None
        try:
            self.scheduler = Scheduler(self.arguments, PortArgs.init_new(self.arguments))
        except BaseException:
            self.close()
            raise
        self._made = 0
        self.finished: dict[str, Any] = {}
        self.overlapped = 0  # steps that began before the one before was looked at

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self, tokens: list[int], new: int, name: str | None = None, stop: int | None = None
    ) -> str:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        ends = {"ignore_eos": True} if stop is None else {"stop_token_ids": [stop]}
        sampling = SamplingParams(temperature=0, max_new_tokens=new, **ends)
        sampling.normalize(None)
        self._made += 1
        name = name or f"request-{self._made}"
        self.scheduler.process_input_requests(
            [
                TokenizedGenerateReqInput(
                    rid=name,
                    input_text=None,
                    input_ids=array("q", tokens),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=sampling,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=False,
                )
            ]
        )
        return name

    def abort(self, name: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=name)])

    def step(self) -> bool:
        """One step, as SGLang's event loops make it; whether there was anything to do."""
        import torch

        scheduler = self.scheduler
        with torch.no_grad():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            busy = self._overlapped(batch) if scheduler.enable_overlap else self._one(batch)
            if not busy:
                scheduler.on_idle()
            scheduler.last_batch = batch
            if busy:
                scheduler.invariant_checker.self_check_during_busy()
        return busy

    def _one(self, batch: Any) -> bool:
        if batch:
            self._process(batch, self.scheduler.run_batch(batch))
        return bool(batch)

    def _overlapped(self, batch: Any) -> bool:
        """Tokens of a step are looked at when the next one has been started: a request that is at
        its end, or gone, may be in that one still."""
        scheduler = self.scheduler
        scheduler.enable_skip_finishing_decode = True
        queue, before = scheduler.result_queue, len(scheduler.result_queue)
        if batch:
            result = scheduler.run_batch(batch)
            queue.append((batch.copy(), result))
        if before:
            self._process(*queue.popleft())
        if batch:
            scheduler.launch_batch_sample_if_needed(result, batch)
        self.overlapped += bool(batch and before)
        return bool(batch or before)

    def _process(self, batch: Any, result: Any) -> None:
        requests = list(batch.reqs)
        self.scheduler.process_batch_result(batch, result)
        self.finished |= {r.rid: r for r in requests if r.finished()}

    def drain(self) -> None:
        while self.step():
            pass

    def generate(self, prompts: list[list[int]], new: int = 24) -> list[list[int]]:
        names = [self.submit(prompt, new) for prompt in prompts]
        self.drain()
        self.cached = [self.finished[name].cached_tokens for name in names]
        return [list(self.finished.pop(name).output_ids) for name in names]

    # -- books ---------------------------------------------------------------------------------

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def tree(self) -> Any:
        return self.scheduler.tree_cache

    def close(self) -> None:
        from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory

        self.scheduler = None
        cleanup_dist_env_and_memory()
