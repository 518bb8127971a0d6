"""The canary beside a server: which requests it takes, when, and what comes out of it."""

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.config")

import tiny
from server_processes import ServerProcess
from serving_models import prompts

from oscarkv.integrations.vllm.settings import Settings

SCORES = {"kl": 0.2, "agreement": 0.9, "drift": 1.1, "tokens": 200, "seconds": 0.1}


class FakeEngine:
    """As much of an AsyncLLM as a Watch sees."""

    def __init__(self, answer=SCORES):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="fake"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=250),
        )
        self.output_processor = self
        self.answer, self.asked, self.busy, self.asleep = answer, [], False, False

    def has_unfinished_requests(self):
        return self.busy

    async def is_sleeping(self):
        return self.asleep

    async def collective_rpc(self, method, args):
        assert method == "oscarkv_rescore"
        self.asked.append(args[0])
        return [self.answer]


def request(prompt, output, **others):
    detokenizer = SimpleNamespace(output_token_ids=list(range(output)))
    fields = {"prompt_token_ids": [7] * prompt, "prompt_embeds": None, "detokenizer": detokenizer}
    return SimpleNamespace(**(fields | others))


@pytest.fixture
def watching(tiny_model):
    from oscarkv.integrations.vllm.canary.options import CanaryOptions
    from oscarkv.integrations.vllm.canary.watch import Watch

    def make(engine, **options):
        options = CanaryOptions(**({"share": 1.0, "interval": 0.0} | options))
        return Watch(engine, Settings(str(tiny_model.artifact)), options)

    return make


def run(engine, watch, *requests):
    async def main():
        for one in requests:
            watch.finished(one)
            if watch._task is not None:
                await watch._task

    asyncio.run(main())
    return [len(tokens) for tokens in engine.asked]


def test_prompt_and_answer_up_to_a_steps_worth(watching):
    engine = FakeEngine()
    assert run(engine, watching(engine), request(140, 20), request(200, 100)) == [160, 250]
    assert engine.asked[0] == [7] * 140 + list(range(20))


def test_what_is_not_rescored(watching):
    engine = FakeEngine()
    watch = watching(engine)
    others = (
        request(130, 13),
        request(0, 190, prompt_token_ids=None),
        request(190, 0, detokenizer=None),
    )
    assert run(engine, watch, *others) == []  # too short; embeddings; pooling
    assert run(engine, watching(engine, share=0.0), request(200, 1)) == []
    engine.asleep = True
    assert run(engine, watch, request(200, 1)) == []


def test_one_at_a_time_and_not_too_often(watching):
    engine = FakeEngine()
    watch = watching(engine, interval=0.2)

    async def main():
        watch.finished(request(200, 1))
        watch.finished(request(201, 1))  # let go
        await watch._task
        started = time.monotonic()
        watch.finished(request(202, 1))
        await watch._task
        assert time.monotonic() - started > 0.15

    asyncio.run(main())
    assert [len(tokens) for tokens in engine.asked] == [201, 203]


def test_it_waits_for_an_idle_moment_but_not_forever(watching):
    engine = FakeEngine()
    engine.busy = True
    watch = watching(engine, interval=0.3)

    async def main():
        watch.finished(request(200, 1))
        await asyncio.sleep(0.1)
        assert not engine.asked
        await asyncio.wait_for(watch._task, 2)

    asyncio.run(main())
    assert len(engine.asked) == 1


def test_a_failure_ends_the_canary_and_nothing_else(watching, monkeypatch):
    from oscarkv.integrations.vllm.canary import watch as module

    said = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *a: said.append(text % a))
    engine = FakeEngine({"error": "OutOfMemoryError: 2 GiB"})
    assert run(engine, watching(engine), request(200, 1), request(200, 1)) == [201]
    assert said == ["oscarkv canary: stops, since rescoring failed: OutOfMemoryError: 2 GiB"]
    watching(engine).finished(SimpleNamespace())  # a request unlike those we know
    assert "no attribute 'prompt_token_ids'" in said[1]


@pytest.mark.slow
def test_vllm_serve(tiny_model, tmp_path):
    """Metrics at /metrics, a line in the log, and the same tokens as without a canary."""
    tiny.tokenizer().save_pretrained(tiny_model.path)
    asked = prompts(300, 310, seed=5)
    plain = CanaryServer(tiny_model, tmp_path / "plain.log", {})
    with plain:
        expected = [plain.complete(prompt) for prompt in asked]
        assert "oscarkv:" not in plain.get("/metrics")
    options = {"canary": {"share": 1, "interval": 0}}
    canary = CanaryServer(tiny_model, tmp_path / "canary.log", options)
    with canary:
        with ThreadPoolExecutor(4) as clients:  # rescoring comes between steps of others
            assert list(clients.map(canary.complete, asked * 4)) == expected * 4
        deadline = time.monotonic() + 60
        while canary.metric("requests_total") < 1 and time.monotonic() < deadline:
            time.sleep(0.5)
        assert canary.metric("requests_total") >= 1
        assert canary.metric("kl") > 0.1  # a random model predicts nothing firmly
        assert 0 <= canary.metric("agreement") < 0.85
        assert canary.metric("drift") > 1
        assert canary.metric("seconds_total") > 0
        assert [canary.complete(prompt) for prompt in asked] == expected
    assert "oscarkv canary: kl " in canary.log.read_text()


class CanaryServer(ServerProcess):
    """What `vllm serve` runs, of a model without a tokenizer."""

    def __init__(self, model, log, options):
        super().__init__(log)
        section = {"artifact": str(model.artifact), "strict": True} | options
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
            *(str(model.path), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "2048"),
            *("--max-num-seqs", "8", "--additional-config", json.dumps({"oscarkv": section})),
        ]
        self.environment = {"VLLM_LOGGING_LEVEL": "INFO"}

    def complete(self, prompt):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = self.get("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
        return json.loads(answer)["choices"][0]["token_ids"]

    def metric(self, name):
        start = f'oscarkv:canary_{name}{{model_name="tiny"}} '
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(start)]
        return float(lines[0].removeprefix(start)) if lines else float("nan")
