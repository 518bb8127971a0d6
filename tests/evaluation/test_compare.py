"""The page of comparisons: from records of every kind, and from few of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oscarkv.errors import OscarError
from oscarkv.evaluation import needle
from oscarkv.evaluation.compare import examples, page
from oscarkv.evaluation.compare.report import render, write_report
from oscarkv.evaluation.compare.sources import read_sources
from oscarkv.evaluation.tasks.record import REFERENCE, TaskRecord, TasksRecord

pytest.importorskip("matplotlib")


def score(kl: float, bits: float, **more: Any) -> dict[str, Any]:
    return {"kl": kl, "kl_se": 0.001, "top1": 1 - kl, "ppl_ratio": 1.01, "bits_128k": bits,
            "layer_errors": {"0": 0.1, "1": 0.2}, **more}  # fmt: skip


@pytest.fixture
def fidelity(tmp_path: Path) -> Path:
    positions = [{"start": 512, "stop": 768, "kl": 0.01, "kl_se": 0.001},
                 {"start": 768, "stop": 1024, "kl": 0.02, "kl_se": None}]  # fmt: skip
    recipes = {
        "balanced": score(0.01, 2.28, kl_by_position=positions),
        "naive-int2": score(0.9, 2.28),
        "kivi-2bit": score(0.1, 3.0, simulated=True, layer_errors={}),
    }
    parts = [{"sides": sides, "layer": layer, "head": None, "kl": 0.001, "kl_se": 0.0}
             for sides in ("keys", "values") for layer in (0, 1)]  # fmt: skip
    record = {
        "format": "oscarkv-fidelity-1", "model": "tiny", "length": 4096, "windows": 2,
        "recipes": recipes, "longer": [{"length": 8192, "windows": 2, "recipes": recipes}],
        "sensitivity": {"balanced": {"parts": parts}},
    }  # fmt: skip
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(record))
    return path


@pytest.fixture
def needles(tmp_path: Path) -> Path:
    made = needle.Needles("tiny", "x", False, False, 512, [4096, 8192], 1,
                          {REFERENCE: {}, "balanced": {"bits_128k": 2.28}})  # fmt: skip
    for length in made.lengths:
        for kind, depth in (("single", 0.05), ("multikey", 0.95), ("tracking", None)):
            right = {"text": "1234567", "score": 1.0}
            wrong = {"text": "12<b>", "score": 0.0}
            answers = {REFERENCE: right, "balanced": right if length == 4096 else wrong}
            made.trials.append({"length": length, "context": 0, "kind": kind, "depth": depth,
                                "targets": ["1234567"], "answers": answers})  # fmt: skip
    made.save(tmp_path / "needle.json")
    return tmp_path / "needle.json"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    problems = [{"id": str(n), "group": "", "target": str(n)} for n in range(10)]
    task = TaskRecord({"title": "GSM8K", "shots": 8}, problems, "x", [0])
    for name, lost in ((REFERENCE, ()), ("balanced", (3,)), ("compact", range(9))):
        for n in range(10):
            text = f"{'long ' * 200}it is {n + (n in lost)}"
            entry = {"text": text, "score": float(n not in lost), "finish": "stop"}
            task.entries(name, 0)[str(n)] = entry
    record = TasksRecord({"model": "tiny", "engine": "vllm", "command": "oscarkv eval tasks"})
    record.settings = {REFERENCE: {}, "balanced": {}, "compact": {"bits_128k": 2.1}}
    record.tasks["gsm8k"] = task
    record.save(tmp_path / "tasks.json")
    return tmp_path / "tasks.json"


def assert_self_contained(text: str) -> None:
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "@import" not in text
    namespaces = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r'https?://[^"<\s]*', text)) <= namespaces
    assert "$" not in text


def test_a_page_of_everything(fidelity: Path, needles: Path, tasks: Path, tmp_path: Path) -> None:
    comparison = read_sources("tiny", [fidelity, needles, tasks])
    assert comparison.names == ["balanced", "kivi-2bit", "naive-int2", "compact"]
    assert comparison.bits("compact") == 2.1
    write_report(comparison, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert_self_contained(text)
    # Bits against KL and against tasks, lengths, forest, positions, layers, sensitivity.
    assert text.count("<svg") == 7
    for title in ("What each recipe costs", "Bits and accuracy", "KL by context length", "Needles",
                  "Tasks: the gap", "Bits and tasks", "KL by position", "Layer by layer",
                  "Where balanced errs", "Worst examples", "Where the figures"):  # fmt: skip
        assert title in text
    assert text.count('class="collapsed"') == 1
    assert "simulated" in text
    assert "12&lt;b&gt;" in text
    assert '10.0 <span class="sure">(-90.0)' in text
    assert "oscarkv eval tasks" in text


def test_any_record_alone_makes_a_page(fidelity: Path, needles: Path, tasks: Path) -> None:
    for path in (fidelity, needles, tasks):
        assert_self_contained(render(read_sources("tiny", [path])))


def test_worst_examples_are_losses_of_tasks_and_needles_in_turn(needles: Path, tasks: Path) -> None:
    comparison = read_sources("tiny", [needles, tasks])
    found = examples.worst(comparison, "balanced", 3)
    assert [example.where.split(",")[0] for example in found] == [
        "GSM8K", "single needle in 8", "multikey needle in 8",
    ]  # fmt: skip
    assert examples.moved(comparison, "balanced") == (4, 0)
    assert "… " in render(comparison)  # long texts from where they part


def test_records_without_texts_make_a_page(tasks: Path) -> None:
    data = json.loads(tasks.read_text())
    for entry in data["tasks"]["gsm8k"]["answers"]["compact"]["0"].values():
        del entry["text"]
        entry["answer"] = "forty"
    tasks.write_text(json.dumps(data))
    assert "forty" in render(read_sources("tiny", [tasks]))


def test_published_records_make_pages() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    for kind in ("fidelity-smollm2-135m", "gsm8k-vllm-h200", "needle-smollm2-135m"):
        assert_self_contained(render(read_sources("published", [results / f"{kind}.json"])))


def record(**fields: Any) -> str:
    return json.dumps({"format": "oscarkv-fidelity-1", **fields})


def test_only_what_was_measured_on_the_same_windows_is_put_together(tmp_path: Path) -> None:
    where = {"model": "m", "text_sha256": "a", "windows": 2, "strict": True, "length": 4096}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(record(**where, recipes={"balanced": score(0.01, 2.28)}))
    other = {"compact": score(0.02, 2.1)}
    for same in (where, {"length": 4096, "windows": 2}):  # older records do not say everything
        second.write_text(record(**same, recipes=other))
        assert read_sources("m", [first, second]).names == ["balanced", "compact"]
    for change, message in (
        ({"model": "n"}, r"model \(m and n\)"),
        ({"text_sha256": "b"}, r"text \(a and b\)"),
        ({"windows": 3}, r"number of windows \(2 and 3\)"),
        ({"strict": False}, r"--strict \(True and False\)"),
    ):
        second.write_text(record(**(where | change), recipes=other))
        with pytest.raises(OscarError, match=f"first.json and .*second.json .*{message}"):
            read_sources("m", [first, second])
        second.write_text(record(**(where | {"length": 600}), recipes={},
                                 longer=[where | change | {"recipes": other}]))  # fmt: skip
        with pytest.raises(OscarError, match=message):
            read_sources("m", [first, second])


def test_bad_records_are_refused(fidelity: Path, needles: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for content, message in (("{", "no JSON"), ("{}", "no record of"), ("[]", "no record of"),
                             ('{"format": "oscarkv-fidelity-1"}', "damaged"),
                             (record(length=1, recipes={"a": 1}), "recipe a is 1, not an object"),
                             (record(length=1, recipes={}, longer=7), "damaged"),
                             (record(length=1, recipes={}, sensitivity=7), "damaged"),
                             (record(length=1, recipes={}, longer=[7]), "damaged")):  # fmt: skip
        other.write_text(content)
        with pytest.raises(OscarError, match=message):
            read_sources("tiny", [other])
    with pytest.raises(OscarError, match="second record of needles"):
        read_sources("tiny", [needles, needles])
    with pytest.raises(OscarError, match="nothing to compare"):
        read_sources("tiny", [])


def test_recipes_keep_their_colours() -> None:
    assert page.colour("balanced") == page.COLOURS["balanced"]
    assert page.colour("something") == page.colour("something")
