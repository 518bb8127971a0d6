"""A stand-in for vLLM: enough of `LLM` for the worker of `oscarkv bench serving`, and its faults.

`install` writes it as a package `vllm` that child processes find first.
"""

from pathlib import Path

SOURCE = """
import os, time
from types import SimpleNamespace as Bag

CAPACITY, AT_ONCE, STEP = 10000, 8, 0.001


class SamplingParams:
    def __init__(self, **knobs):
        self.__dict__.update(knobs)


class Connector:
    def get_num_new_matched_tokens(self, *_):
        return 99, False


class Scheduler:
    def __init__(self):
        self.connector = Bag(connector_scheduler=Connector())

    def _preempt_request(self, request):
        pass


class Engine:
    def __init__(self, knobs):
        self.vllm_config = Bag(
            cache_config=Bag(kv_cache_size_tokens=CAPACITY, num_gpu_blocks=625,
                             kv_cache_max_concurrency=CAPACITY / knobs["max_model_len"]),
            model_config=Bag(max_model_len=knobs["max_model_len"], dtype="torch.float32"),
            device_config=Bag(device_type="cpu"),
            compilation_config=Bag(static_forward_context={}),
        )
        self.waiting = []
        self.engine_core = Bag(engine_core=Bag(scheduler=Scheduler()))

    def add_request(self, name, prompt, sampling):
        assert sampling.max_tokens + len(prompt["prompt_token_ids"]) <= \\
            self.vllm_config.model_config.max_model_len
        self.waiting.append([name, sampling.max_tokens])

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def abort_request(self, names):
        self.waiting = [entry for entry in self.waiting if entry[0] not in names]

    def step(self):
        time.sleep(STEP)
        made = []
        scheduler = self.engine_core.engine_core.scheduler
        found = scheduler.connector.connector_scheduler.get_num_new_matched_tokens()
        if not found[0]:  # the prompt is read
            time.sleep(STEP * 20)
        if len(self.waiting) > AT_ONCE:
            scheduler._preempt_request(Bag(request_id=self.waiting[-1][0]))
        for entry in self.waiting[:AT_ONCE]:
            entry[1] -= 1
            output = Bag(token_ids=[7])
            made.append(Bag(request_id=entry[0], outputs=[output], finished=not entry[1]))
        self.waiting = [entry for entry in self.waiting if entry[1]]
        return made


class LLM:
    def __init__(self, model, **knobs):
        print("loading", model)
        fault = knobs.get("fault")
        if fault == "raises":
            raise ValueError("no such\\nthing")
        if fault == "dies":
            print("TerribleError: out of luck", flush=True)
            os._exit(7)
        if fault == "hangs":
            time.sleep(600)
        self.llm_engine = Engine(knobs)
"""
REGISTRY = """
class AttentionBackendEnum:
    class CUSTOM:
        is_overridden = staticmethod(lambda: LOADED)
        get_path = staticmethod(lambda: "oscarkv.somewhere")

LOADED = {loaded}
"""
KINDS = """
class RequestOutputKind:
    DELTA = 1
"""


def install(folder: Path, *, plugin: bool = True) -> None:
    files = {
        "vllm/__init__.py": SOURCE,
        "vllm/sampling_params.py": KINDS,
        "vllm/v1/__init__.py": "",
        "vllm/v1/attention/__init__.py": "",
        "vllm/v1/attention/backends/__init__.py": "",
        "vllm/v1/attention/backends/registry.py": REGISTRY.format(loaded=plugin),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
