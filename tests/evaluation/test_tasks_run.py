"""Asking, keeping, resuming and comparing: with stand-ins for engines, and with a tiny model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations"))
import tiny

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks import harness
from oscarkv.evaluation.tasks.plan import load_plan, plan_names
from oscarkv.evaluation.tasks.record import REFERENCE, TaskRecord, TasksRecord, load_record
from oscarkv.evaluation.tasks.registry import get_task
from oscarkv.evaluation.tasks.requests import Answer, Request, Sampling, Take, cut
from oscarkv.evaluation.tasks.run import TaskPlan, merge, prepare, run_setting
from oscarkv.evaluation.tasks.transformers_engine import TransformersEngine
from oscarkv.evaluation.tasks.vllm_engine import VllmEngine

TASK = get_task("gsm8k")
ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(6)]


def make_plan(seeds: int = 1, **changes: Any) -> TaskPlan:
    options: dict[str, Any] = {
        "task": TASK,
        "problems": [TASK.read(row, i) for i, row in enumerate(ROWS)],
        "examples": [],
        "chat": False,
        "max_new_tokens": 20,
        "seeds": range(seeds),
        "sampling": Sampling(),
        "data": "rows",
    }
    return TaskPlan(**(options | changes))


class Pupil:
    """Answers all but some problems rightly; may be interrupted after a few."""

    def __init__(self, wrong: Sequence[str] = (), stop_after: int | None = None) -> None:
        self.wrong, self.stop_after, self.asked = wrong, stop_after, []

    def answer(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None:
        for count, request in enumerate(requests):
            if count == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(request)
            problem = request.key.split("/")[2]
            right = int(problem) + 1 + (problem in self.wrong)
            take(Answer(request.key, f" It is\n#### {right}\n\nQuestion: 9?", 9, "stop"))


def start(plan: TaskPlan) -> tuple[TasksRecord, dict[str, Any]]:
    record = TasksRecord({"model": "tiny", "engine": "none"}, {REFERENCE: {}, "packed": {}})
    task, prompts = prepare(plan, tiny.tokenizer(), 4096)
    record.tasks["gsm8k"] = task
    return record, {"gsm8k": prompts}


def test_answers_are_scored_kept_and_gone_on_with(tmp_path: Path) -> None:
    plan, path = make_plan(), tmp_path / "tasks.json"
    record, prompts = start(plan)
    options: dict[str, Any] = {"context": 4096, "path": path}
    run_setting(REFERENCE, Pupil(["4"]), [plan], prompts, record, **options)
    with pytest.raises(KeyboardInterrupt):
        run_setting("packed", Pupil(stop_after=2), [plan], prompts, record, **options)

    kept = load_record(path)
    again, prompts = start(plan)
    again.tasks["gsm8k"] = merge(again.tasks["gsm8k"], kept.tasks["gsm8k"], "gsm8k")
    assert again.tasks["gsm8k"].gap("packed") is None  # not all of it is there
    pupil = Pupil(["0", "5", "2"])
    run_setting("packed", pupil, [plan], prompts, again, **options)
    assert [request.key for request in pupil.asked] == [f"gsm8k/0/{n}" for n in (2, 3, 4, 5)]
    found = again.tasks["gsm8k"].gap("packed")
    assert found is not None
    assert (found.reference, found.score) == (pytest.approx(5 / 6), pytest.approx(4 / 6))
    assert (found.better, found.worse) == (1, 2)
    entry = again.tasks["gsm8k"].entries("packed", 0)["3"]
    assert entry == {"text": " It is\n#### 4\n\n", "answer": "4", "score": 1.0, "tokens": 9,
                     "finish": "stop"}  # fmt: skip

    data = json.loads(path.read_text())
    assert data["tasks"]["gsm8k"]["results"]["packed"]["gap"]["worse"] == 2
    assert load_record(path).tasks["gsm8k"].scores("packed") == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_other_prompts_or_sampling_are_not_mixed() -> None:
    earlier, _ = start(make_plan())
    for other in (make_plan(max_new_tokens=21), make_plan(sampling=Sampling(0.6)),
                  make_plan(examples=[make_plan().problems[0]])):  # fmt: skip
        task, _ = prepare(other, tiny.tokenizer(), 4096)
        with pytest.raises(OscarError, match="move it away"):
            merge(task, earlier.tasks["gsm8k"], "gsm8k")


def test_other_sampling_of_lm_eval_is_not_mixed() -> None:
    tasks: dict[str, TaskRecord] = {}
    sample = {"doc_id": 0, "target": "1", "arguments": "1?", "resps": [["1"]], "metrics": ["em"],
              "filtered_resps": ["1"], "em": 1.0}  # fmt: skip

    def take(setting: str, sampling: Sampling, most: int | None) -> None:
        how = harness._how(sampling, most)
        harness._take(tasks, "lm-eval:sums", setting, 0, [sample], how, None)

    take(REFERENCE, Sampling(), 20)
    take("packed", Sampling(), 20)
    harness.require_same(["sums", "others"], tasks, Sampling(), 20)
    for sampling, most, what in ((Sampling(0.6), 20, "sampling"), (Sampling(), 9, "max_new_tok")):
        message = f"answers of lm-eval:sums with another {what}"
        with pytest.raises(OscarError, match=message):
            take("packed", sampling, most)
        with pytest.raises(OscarError, match=message):
            harness.require_same(["sums"], tasks, sampling, most)
    del tasks["lm-eval:sums"].about["max_new_tokens"]  # as records were written before
    take("packed", Sampling(), 9)


def test_several_seeds_are_averaged_by_problem() -> None:
    plan = make_plan(seeds=2, sampling=Sampling(0.6))
    record, prompts = start(plan)
    options: dict[str, Any] = {"context": 4096, "path": None}
    run_setting(REFERENCE, Pupil(), [plan], prompts, record, **options)
    pupil = Pupil(["1"])
    run_setting("packed", pupil, [plan], prompts, record, **options)
    assert len({request.seed for request in pupil.asked}) == 12
    task = record.tasks["gsm8k"]
    task.entries("packed", 1)["1"]["score"] = 1.0
    assert task.scores("packed") == [1, 0.5, 1, 1, 1, 1]
    assert task.by_seed("packed") == [pytest.approx(5 / 6), 1.0]


def test_programs_are_run_beside_the_engine() -> None:
    task = get_task("humaneval")
    rows = [
        {"task_id": f"t/{n}", "prompt": f"def f{n}(x):\n", "entry_point": f"f{n}",
         "test": "def check(f):\n    assert f(2) == 4\n"}
        for n in range(3)
    ]  # fmt: skip
    problems = [task.read(row, n) for n, row in enumerate(rows)]
    plan = make_plan(task=task, problems=problems)
    record = TasksRecord({}, {"packed": {}})
    record.tasks["humaneval"], prompts = prepare(plan, tiny.tokenizer(), 4096)

    class Coder:
        def answer(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None:
            for request in requests:
                body = "x + x" if request.key != "humaneval/0/t/1" else "x"
                take(Answer(request.key, f"    return {body}\n", 5, "stop"))

    options: dict[str, Any] = {"context": 4096, "path": None}
    run_setting("packed", Coder(), [plan], {"humaneval": prompts}, record, **options)
    assert record.tasks["humaneval"].scores("packed") == [1.0, 0.0, 1.0]
    assert "AssertionError" in record.tasks["humaneval"].entries("packed", 0)["t/1"]["note"]


def test_long_prompts_are_refused_or_lose_their_middle() -> None:
    with pytest.raises(OscarError, match="fewer --shots"):
        prepare(make_plan(), tiny.tokenizer(), 16)
    longbench = get_task("longbench")
    row = {"dataset": "hotpotqa", "input": "Who?", "context": "x" * 500, "answers": ["y"]}
    plan = make_plan(task=longbench, problems=[longbench.read(row, 0)], max_new_tokens=32)
    _, ((tokens,)) = prepare(plan, tiny.tokenizer(), 128)
    assert len(tokens) == 96
    assert tiny.tokenizer().decode(tokens).endswith("Who?\n\nAnswer:")


def test_texts_are_cut_at_the_first_stop() -> None:
    assert cut("a b c", ["c", "b"]) == "a "
    assert cut("a b c", []) == "a b c"


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_transformers_in_batches_gives_what_single_prompts_give(packed: bool) -> None:
    model, tokenizer = tiny.model("llama"), tiny.tokenizer()
    artifact = tiny.calibrated("llama") if packed else None
    texts = [tiny.text(60 + 9 * n, seed=n) for n in range(5)]
    requests = [Request(str(n), tokenizer(text)["input_ids"], 8, n) for n, text in enumerate(texts)]
    sizes: list[int] = []

    class Watched(TransformersEngine):
        def _batch(self, requests: Any, *rest: Any) -> None:
            sizes.append(len(requests))
            super()._batch(requests, *rest)

    def ask(batch: int) -> dict[str, str]:
        found: dict[str, str] = {}
        engine = Watched(model, tokenizer, artifact, batch)
        engine.answer(requests, Sampling(), lambda a: found.__setitem__(a.key, a.text))
        return found

    together = ask(3)
    assert sizes == [3, 2]
    assert together == ask(1)
    assert len(together) == 5


def test_transformers_stops_and_samples_by_seed() -> None:
    model, tokenizer = tiny.model("llama"), tiny.tokenizer()
    tokens = tokenizer(tiny.text(40))["input_ids"]
    engine, found = TransformersEngine(model, tokenizer, None), {}

    def ask(seed: int, stop: tuple[str, ...] = ()) -> Answer:
        request = Request("0", tokens, 12, seed, stop)
        engine.answer([request], Sampling(1.0), lambda a: found.__setitem__(a.key, a))
        return found["0"]

    first = ask(1)
    assert first.finish == "length"
    assert ask(1).text == first.text
    assert ask(2).text != first.text
    stopped = ask(1, (next(c for c in first.text[:9] if c.isascii() and c.isprintable()),))
    assert stopped.finish == "stop"
    assert stopped.tokens < 12


FAKE = """
import os
from types import SimpleNamespace as Bag
class SamplingParams:
    def __init__(self, **knobs): self.__dict__.update(knobs)
class Engine:
    def __init__(self, knobs):
        self.vllm_config = Bag(cache_config=Bag(kv_cache_size_tokens=100),
            model_config=Bag(max_model_len=knobs["max_model_len"], dtype="torch.float32"),
            compilation_config=Bag(static_forward_context={}))
        self.waiting = []
    def add_request(self, name, prompt, sampling): self.waiting.append((name, prompt, sampling))
    def has_unfinished_requests(self): return bool(self.waiting)
    def step(self):
        name, prompt, sampling = self.waiting.pop(0)
        if len(prompt["prompt_token_ids"]) == 13:
            print("GrimError: bad luck", flush=True)
            os._exit(3)
        text = f"{len(prompt['prompt_token_ids'])} {sampling.temperature} {sampling.stop}"
        out = Bag(text=text, token_ids=[1, 2], finish_reason="stop")
        return [Bag(request_id=name, outputs=[out], finished=True)]
class LLM:
    def __init__(self, model, **knobs):
        print("some talk of the engine")
        if knobs.get("fault"): raise ValueError("no such model")
        self.llm_engine = Engine(knobs)
"""
FAKE_REGISTRY = """
class AttentionBackendEnum:
    class CUSTOM:
        is_overridden = staticmethod(lambda: False)
        get_path = staticmethod(lambda: "")
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("vllm", "vllm/v1", "vllm/v1/attention", "vllm/v1/attention/backends")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "vllm/__init__.py").write_text(FAKE)
    (tmp_path / "vllm/sampling_params.py").write_text("class RequestOutputKind: FINAL_ONLY = 2\n")
    (tmp_path / names[-1] / "registry.py").write_text(FAKE_REGISTRY)
    source = str(Path(sys.modules["oscarkv"].__file__ or "").parent.parent)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}")


@pytest.mark.usefixtures("fake_vllm")
def test_vllm_answers_from_a_process_of_its_own(tmp_path: Path) -> None:
    log, said, found = tmp_path / "log", [], {}
    engine = VllmEngine("model", {"max_model_len": 64}, said.append, log)
    requests = [Request(f"k{n}", [1] * n, 4, n, ("\n",)) for n in (3, 5)]
    engine.answer(requests, Sampling(0.5), lambda a: found.__setitem__(a.key, a.text))
    assert found == {"k3": "3 0.5 ['\\n']", "k5": "5 0.5 ['\\n']"}
    assert "some talk of the engine" in log.read_text()
    assert "100 tokens" in said[0]


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize(
    ("engine", "tokens", "message"),
    [
        ({"max_model_len": 64, "fault": True}, 3, "ValueError: no such model"),
        ({"max_model_len": 64}, 13, "ended with 3: GrimError: bad luck"),
        ({"max_model_len": 64, "additional_config": {}}, 3, "did not load oscarkv's plugin"),
    ],
)
def test_vllm_that_fails_says_why(engine: dict[str, Any], tokens: int, message: str) -> None:
    request = Request("k", [1] * tokens, 4, 0)
    with pytest.raises(OscarError, match=message):
        VllmEngine("model", engine).answer([request], Sampling(), lambda _: None)


# -- plans -----------------------------------------------------------------------------------------

MODELS = ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "zai-org/GLM-4.7-FP8",
          "MiniMaxAI/MiniMax-M2.7")  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_protocol_names_its_models(model: str) -> None:
    plan = load_plan("paper", model)
    assert plan.tasks == ("gpqa-diamond", "humaneval", "livecodebench-v6", "aime25", "math500")
    assert plan.max_new_tokens == 32768
    assert plan.seeds == (3 if "GLM" in model else 5)
    assert not plan.sampling.greedy
    assert load_plan("paper", f"/somewhere/{model.split('/')[1]}") == plan


def test_plans_of_ones_own_and_bad_ones(tmp_path: Path) -> None:
    assert plan_names() == ["paper"]
    file = tmp_path / "mine.toml"
    body = 'title="t"\ntasks=["gsm8k"]\nmax_new_tokens=9\nseeds=2\nchat=false\n'
    file.write_text(f"{body}[models.m]\nsampling={{temperature=1.0}}\n")
    assert load_plan(str(file), "m").seeds == 2
    for text, message in (
        ("x", "no TOML"),
        (f"{body}colour=1\n", "unknown colour"),
        (f"{body}[models.m]\nsampling={{heat=1.0}}\n", "mine.toml, m"),
        (f"{body}[models.m]\nsampling={{temperature=-1.0}}\n", "temperature -1"),
        (f"{body}[models.n]\nsampling={{}}\n", "has no model m; it has n"),
        (f'{body}models=["m"]\n', "models is .'m'., not a table"),
        (f"{body}models={{m=3}}\n", "m is 3, not a table"),
        (f"{body}[models.m]\nsampling={{}}\nengine=3\n", "m: engine is 3, not a table"),
    ):
        file.write_text(text)
        with pytest.raises(OscarError, match=message):
            load_plan(str(file), "m")
    file.write_bytes(b'title = "\xff"')
    with pytest.raises(OscarError, match="not UTF-8"):
        load_plan(str(file), "m")
    with pytest.raises(OscarError, match="no plan 'other'"):
        load_plan("other", "m")
