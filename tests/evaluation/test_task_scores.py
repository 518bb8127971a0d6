"""Every task on a small fixture: right answers count, wrong ones do not."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from oscarkv.errors import MissingDependencyError, OscarError
from oscarkv.evaluation.tasks import data, livecodebench, longbench
from oscarkv.evaluation.tasks.data import problems, read_rows
from oscarkv.evaluation.tasks.registry import TASKS, get_task

GPQA = {
    "Record ID": "rec1",
    "Question": "Which is a noble gas?",
    "Correct Answer": "Neon",
    "Incorrect Answer 1": "Oxygen",
    "Incorrect Answer 2": "Iron",
    "Incorrect Answer 3": "Gold",
    "High-level domain": "Chemistry",
}
HUMANEVAL = {
    "task_id": "Fixture/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "test": "def check(f):\n    assert f([1, 2]) == 3\n    assert f([]) == 0\n",
}
HIDDEN = [{"input": "5\n", "output": "25\n", "testtype": "stdin"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


SQUARE = {
    "question_id": "q1",
    "question_content": "Print the square of a number.",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "3\n", "output": "9\n", "testtype": "stdin"}]),
    "private_test_cases": packed(json.dumps(HIDDEN)),
    "metadata": "{}",
}
METHOD = {
    "question_id": "q2",
    "question_content": "Add two numbers.",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps(
        [{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]
    ),
    "private_test_cases": "[]",
    "metadata": '{"func_name": "add"}',
}
FIXTURES: list[tuple[str, dict[str, Any], str, str]] = [
    ("gsm8k", {"question": "2 + 3?", "answer": "It is <<2+3=5>>5.\n#### 5"}, "It is\n#### 5",
     "It is\n#### 6"),
    ("math500", {"problem": "Half of 1?", "answer": r"\frac{1}{2}", "solution": ""},
     r"It is $\boxed{0.5}$.", r"It is $\boxed{2}$."),
    ("aime25", {"problem": "Digits?", "answer": "070", "id": 3}, r"\boxed{70}", r"\boxed{71}"),
    ("humaneval", HUMANEVAL, "    return sum(xs)\n", "    return len(xs)\n"),
    ("humaneval", HUMANEVAL, "```python\ndef total(xs):\n    return sum(xs)\n```",
     "```python\ndef total(xs):\n    import sys\n    sys.exit(0)\n```"),
    ("humaneval", HUMANEVAL,
     "```python\ndef total(xs):\n    return sum(xs)\n```\nUse:\n```python\ntotal([1])\n```",
     "```python\ndef total(xs):\n    return 0\n```"),
    ("livecodebench-v6", SQUARE, "```python\nprint(int(input())**2)\n```",
     "```python\nprint(9)\n```"),
    ("livecodebench-v6", METHOD,
     "```python\nclass Solution:\n    def add(self, a, b):\n        return a + [b]\n```",
     "```python\nclass Solution:\n    def add(self, a, b):\n        return a\n```"),
    ("longbench", {"dataset": "hotpotqa", "input": "Who?", "context": "Ada wrote it.",
     "answers": ["Ada Lovelace"], "_id": "x"}, "Ada Lovelace", "Charles Babbage"),
    ("ruler", {"input": "Find it.", "outputs": ["123", "456"], "task": "niah", "index": 1},
     "123 and 456", "789"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "right", "wrong"), FIXTURES)
def test_right_and_wrong_answers(
    name: str, row: dict[str, Any], right: str, wrong: str, tmp_path: Path
) -> None:
    task = get_task(name)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (problem,) = problems(task, file)
    assert task.score(right, problem).score == 1.0
    assert task.score(f"<think>{wrong}</think>{right}", problem).score == 1.0 or name == "humaneval"
    assert task.score(wrong, problem).score == 0.0
    assert task.score("", problem).score == 0.0
    for chat in (False, True):
        assert problem.question in task.ask(problem, [], chat) or name == "humaneval"


def test_every_task_has_a_fixture() -> None:
    assert {name for name, *_ in FIXTURES} | {"gpqa-diamond"} == set(TASKS)


def test_gpqa_options_are_shuffled_and_the_letter_follows() -> None:
    task, letters = get_task("gpqa-diamond"), set()
    for index in range(20):
        problem = task.read(GPQA, index)
        letters.add(problem.target)
        assert problem.extra["options"]["ABCD".index(problem.target)] == "Neon"
        assert task.score(f"Answer: {problem.target}", problem).score == 1.0
        wrong = "A" if problem.target != "A" else "B"
        assert task.score(f"Answer: {wrong}", problem).score == 0.0
    assert letters == set("ABCD")
    assert f"{problem.target}) Neon" in task.ask(problem, [], True)


def test_worked_examples_show_the_marked_answer() -> None:
    task = get_task("gsm8k")
    one = task.read({"question": "1 + 1?", "answer": "<<1+1=2>>2.\n#### 2"}, 0)
    assert task.ask(one, [one], False) == (
        "Question: 1 + 1?\nAnswer: 2.\n#### 2\n\nQuestion: 1 + 1?\nAnswer:"
    )


class Evil:
    def __reduce__(self) -> Any:
        return (Path("evil-was-here").touch, ())


def test_hidden_tests_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(livecodebench.unpack(packed(json.dumps(HIDDEN)))) == HIDDEN
    for bad in (packed(Evil()), packed(["a list"]), "no base64!", base64.b64encode(b"x").decode()):
        with pytest.raises(ValueError, match="hidden tests"):
            livecodebench.unpack(bad)
    assert not list(tmp_path.iterdir())


def test_programs_find_what_the_benchmark_imports() -> None:
    task = get_task("livecodebench-v6")
    program = "from __future__ import annotations\nprint(pow(int(input()), 2, 10**9) + gcd(0, 0))"
    assert task.score(f"```python\n{program}\n```", task.read(SQUARE, 0)).score == 1.0


def test_large_numbers_are_compared_to_the_last_digit() -> None:
    assert livecodebench._same("0.50\n1e3", "0.5\n1000")
    assert not livecodebench._same("500000000000000000", "500000000000000001")
    assert not livecodebench._same("yes", "no")


def test_longbench_measures() -> None:
    assert longbench.f1("the Ada Lovelace!", "ada lovelace") == 1.0
    assert longbench.f1("Ada", "Ada Lovelace") == pytest.approx(2 / 3)
    assert longbench.rouge_l("a b c d", "a c d e") == pytest.approx(0.75)
    assert longbench.number("Paragraph 3 or 4", "Paragraph 3") == 0.5
    assert longbench.code("```\nx = 1\ny", "x = 1") == 1.0


def test_ruler_questions_take_any_answer() -> None:
    task = get_task("ruler")
    row = {"input": "Q", "outputs": ["Paris", "Lutetia"], "task": "qa_1"}
    assert task.score("It is paris.", task.read(row, 0)).score == 1.0
    assert task.score("paris", task.read(row | {"task": "niah"}, 0)).score == 0.5


def test_ruler_as_its_generator_and_as_the_hub_has_it(tmp_path: Path) -> None:
    row = {"index": 0, "input": "Q", "outputs": ["Paris", "Lutetia"], "length": 4096}
    for name in ("qa_1", "niah_single_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "validation.jsonl").write_text(json.dumps(row) + "\n")
    task = get_task("ruler")
    found = problems(task, tmp_path)
    assert [problem.group for problem in found] == ["niah_single_1", "qa_1"]
    assert [task.score("Paris", problem).score for problem in found] == [0.5, 1.0]
    hub = {"context": "It is 7.", "question": "What?", "answer_prefix": "It is", "answer": ["7"]}
    problem = task.read(hub | {"task": "niah"}, 0)
    assert problem.question == "It is 7.\nWhat?\nIt is"
    assert task.score("7", problem).score == 1.0


def test_data_sets_that_are_scripts_are_read_by_their_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys
    from types import SimpleNamespace

    asked = []

    def load_dataset(kind: str, data_files: str, **_: Any) -> list[dict[str, Any]]:
        asked.append((kind, data_files))
        row = {"dataset": "qasper", "input": "Who?", "context": "Ada.", "answers": ["Ada"]}
        return [row | {"_id": data_files}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(problems(get_task("longbench"), None)) == len(longbench.SUBSETS)
    url = "hf://datasets/THUDM/LongBench/data.zip"
    assert asked[0] == ("json", f"zip://data/narrativeqa.jsonl::{url}")
    files = [data._url("a/b", file) for file in livecodebench.TASK.hub.files]
    assert files[::5] == ["hf://datasets/a/b/test.jsonl", "hf://datasets/a/b/test6.jsonl"]


def test_rows_of_every_kind_of_file(tmp_path: Path) -> None:
    import gzip

    row = {"question": "Q", "answer": "#### 1"}
    (tmp_path / "a.json").write_text(json.dumps({"data": [row, row]}))
    (tmp_path / "b.csv").write_text('question,answer\nQ,"#### 1\nmore"\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(row)}\n".encode()))
    assert [len(list(read_rows(tmp_path / n))) for n in ("a.json", "b.csv", "c.jsonl.gz")] == [
        2, 1, 1
    ]  # fmt: skip
    assert len(list(read_rows(tmp_path))) == 4
    assert next(iter(read_rows(tmp_path / "b.csv")))["answer"] == "#### 1\nmore"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "rows are read from"),
        ("a.jsonl", "{", "is damaged"),
        ("a.jsonl", "[1]", "named fields"),
        ("a.jsonl", '{"question": "Q"}', "row 1 has no field 'answer'"),
        ("a.jsonl", '{"question": "Q", "answer": "none"}', "no number after ####"),
        ("a.jsonl", "", "has no problems"),
        ("a.json", "5", "no list of objects"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(OscarError, match=message):
        problems(get_task("gsm8k"), file)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"oscarkv\[eval\]"):
        problems(get_task("gsm8k"), None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(MissingDependencyError, match="pyarrow"):
        problems(get_task("gsm8k"), tmp_path / "a.parquet")
    with pytest.raises(OscarError, match="no task 'gsm9k'"):
        get_task("gsm9k")
