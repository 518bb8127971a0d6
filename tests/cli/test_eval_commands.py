"""`oscarkv eval tasks` and `oscarkv eval needle`, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import Run

from oscarkv.cli import gather
from oscarkv.cli.task_place import Place
from oscarkv.cli.tasks import _knobs, _longest
from oscarkv.demo.run import book
from oscarkv.errors import OscarError


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(3)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tasks_are_asked_compared_and_gone_on_with(
    run: Run, tiny: Path, artifact: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ["eval", "tasks", tiny, "--tasks", "gsm8k", "--data", f"gsm8k={rows}", "--artifact"]
    words += [artifact, "--max-new-tokens", 4, "--json", out]
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "uniform" in first.output
    assert "full precision" in first.output
    data = json.loads(out.read_text())
    assert data["settings"]["uniform"]["bits_128k"] < 4
    answers = data["tasks"]["gsm8k"]["answers"]
    assert {len(answers[name]["0"]) for name in ("uniform", "full precision")} == {3}
    data["tasks"]["gsm8k"]["answers"]["uniform"]["0"]["1"]["text"] = "kept"
    out.write_text(json.dumps(data))
    assert run(*words).exit_code == 0
    kept = json.loads(out.read_text())["tasks"]["gsm8k"]["answers"]["uniform"]["0"]["1"]
    assert kept["text"] == "kept"
    other = run(*words, "--recent", 64)
    assert other.exit_code == 2
    assert "holds answers of uniform with another bits_128k, recent" in other.stderr
    other = run(*words, "--dtype", "bfloat16")
    assert other.exit_code == 2
    assert "holds answers of full precision with another dtype;" in other.stderr

    data = json.loads(out.read_text())
    for setting in data["settings"].values():  # as records were written before
        for key in ("dtype", "weights", "backend"):
            setting.pop(key, None)
    out.write_text(json.dumps(data))
    assert run(*words).exit_code == 0
    data = json.loads(out.read_text())
    weights = data["settings"]["full precision"]["weights"]
    data["settings"]["full precision"]["weights"] = "8040" + weights[4:]  # 4 in bfloat16
    out.write_text(json.dumps(data))
    other = run(*words)
    assert other.exit_code == 2
    assert "holds answers of full precision with another weights;" in other.stderr


def test_settings_of_vllm_tell_what_answers_depend_on(
    tiny: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tiny), "vllm", None, "auto")
    artifacts = gather.load_artifacts([artifact])

    def describe(**changes: Any) -> dict[str, dict[str, Any]]:
        given: dict[str, Any] = {"strict": False, "backend": "auto", "baseline": "", "knobs": {}}
        return place.describe_settings(artifacts, **(given | changes))

    monkeypatch.setattr("oscarkv.benchmark.machine.gpus", lambda: [object()])
    before = describe()
    assert before["full precision"]["weights"] == artifacts["uniform"].model.fingerprint
    assert before["full precision"]["attention"] == "FLASH_ATTN"
    assert gather.same_settings(before, describe(baseline="FLASH_ATTN")) == before
    for changes, message in (
        ({"baseline": "TRITON_ATTN"}, "full precision with another attention;"),
        ({"knobs": {"dtype": "float16"}}, "full precision with another dtype, engine_options;"),
        ({"knobs": {"enforce_eager": True}}, "full precision with another engine_options;"),
        ({"backend": "triton"}, "uniform with another backend;"),
    ):
        with pytest.raises(OscarError, match=message):
            gather.same_settings(before, describe(**changes))
    monkeypatch.setattr("oscarkv.benchmark.machine.gpus", list)
    with pytest.raises(OscarError, match="another dtype, attention;"):
        gather.same_settings(before, describe())


def test_the_longest_request_of_lm_eval_is_not_known() -> None:
    plan = SimpleNamespace(task=SimpleNamespace(name="gsm8k"), max_new_tokens=16)
    prompts = {"gsm8k": [[1] * 100, [1] * 20]}
    assert _longest([plan], prompts, 4096, False) == 116  # type: ignore[list-item]
    assert _longest([plan], prompts, 4096, True) == 4096  # type: ignore[list-item]
    assert _longest([], {}, 4096, True) == 4096


def test_tasks_refuses_what_cannot_work(
    refuses: Callable[..., str], run: Run, tiny: Path, artifact: Path, rows: Path
) -> None:
    def tasks(*words: object) -> str:
        return refuses("eval", "tasks", tiny, *words)

    give = ("--artifact", artifact)
    assert "gsm8k, math500, humaneval" in tasks(*give)
    assert "no task 'gsm9k'" in tasks("--tasks", "gsm9k", *give)
    assert "--run-code" in tasks("--tasks", "humaneval,gsm8k", *give)
    assert "nothing to compare" in tasks("--tasks", "gsm8k")
    assert "no engine 'tgi'" in tasks("--tasks", "gsm8k", "--engine", "tgi", *give)
    assert "write TASK=FILE" in tasks("--tasks", "gsm8k", "--data", rows, *give)
    given = ("--tasks", "gsm8k", "--data", f"gsm8k={rows}", *give)
    assert "--examples gsm8k=" in tasks(*given, "--shots", 2)
    assert "set --temperature" in tasks(*given, "--seeds", 3)
    assert "no chat template" in tasks(*given, "--chat")
    assert "has no model" in tasks("--plan", "paper", *give)
    listed = run("eval", "tasks", tiny, "--tasks", "list")
    assert "livecodebench-v6" in listed.output


def test_needle_refuses_what_cannot_work(
    refuses: Callable[..., str], tiny: Path, artifact: Path, text: Path, tmp_path: Path
) -> None:
    def needle(*words: object) -> str:
        return refuses("eval", "needle", tiny, "--text", text, *words)

    give = ("--artifact", artifact)
    assert "nothing to compare" in needle()
    assert "beyond the model's context of 1024" in needle(*give)
    assert "no room" in needle(*give, "--lengths", "1024")
    assert "is no length" in needle(*give, "--lengths", "4x")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert "no record of needles" in needle(*give, "--json", bad)


def test_needles_are_found_compared_and_drawn(run: Run, tmp_path: Path) -> None:
    from commandline import save_tiny_model
    from transformers import AutoConfig

    folder = save_tiny_model(tmp_path / "longer")
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 4096
    config.save_pretrained(folder)
    hay = tmp_path / "hay.txt"
    hay.write_text(book("alice.txt")[:6000].encode("ascii", "ignore").decode())
    out, plot = tmp_path / "needle.json", tmp_path / "needle.png"
    words = ["eval", "needle", folder, "--text", hay, "--recipes", "quarot-int2", "--lengths", "3k"]
    result = run(*words, "--trials", 4, "--json", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "quarot-int2" in result.output
    data = json.loads(out.read_text())
    assert len(data["trials"]) == 12
    assert all(len(trial["answers"]) == 2 for trial in data["trials"])
    assert plot.stat().st_size > 1000
    other = run(*words, "--trials", 4, "--json", out, "--dtype", "bfloat16")
    assert other.exit_code == 2
    assert "holds answers of full precision with another dtype;" in other.stderr


def test_a_plan_is_one_command(run: Run, tiny: Path, rows: Path, tmp_path: Path) -> None:
    """Without an artifact the model is calibrated first, in a process of its own."""
    plan = tmp_path / "mine.toml"
    plan.write_text(
        'title = "mine"\ntasks = ["gsm8k"]\nmax_new_tokens = 4\nseeds = 2\nchat = false\n'
        f'[models."{tiny.name}"]\nsampling = {{ temperature = 1.0 }}\n'
    )
    out = tmp_path / "out.json"
    words = ["eval", "tasks", tiny, "--plan", plan, "--data", f"gsm8k={rows}", "--json", out]
    result = run(*words, "--tokens", 3000)
    assert result.exit_code == 0, result.output
    assert out.with_suffix(".safetensors").exists()
    task = json.loads(out.read_text())["tasks"]["gsm8k"]
    assert task["seeds"] == [0, 1]
    assert len(task["results"]["balanced"]["by_seed"]) == 2


def test_dtype_is_vllms_as_well() -> None:
    plan: Any = SimpleNamespace(engine={"dtype": "bfloat16", "seed": 1})
    assert _knobs(plan, "auto", []) == {"dtype": "bfloat16", "seed": 1}
    assert _knobs(plan, "float16", ["seed=2"]) == {"dtype": "float16", "seed": 2}
    assert _knobs(None, "float16", ['dtype="float32"']) == {"dtype": "float32"}
    assert _knobs(None, "auto", []) == {}
