"""LiveCodeBench v6: contest problems with tests (Jain et al., arXiv 2403.07974).

Tests are inputs and outputs of a program, or arguments and results of a method of `Solution`. The
hidden ones are shipped as a pickled string: it is read as data, and nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from oscarkv.evaluation.tasks.answers import after_thinking, code_blocks
from oscarkv.evaluation.tasks.sandbox import run_code, run_script
from oscarkv.evaluation.tasks.task import Hub, Problem, Row, Task, Verdict

SECONDS = 6.0  # a test
#: What a pickle of one string consists of.
_STRING_ONLY = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE",
                "BINPUT", "LONG_BINPUT", "STOP"}  # fmt: skip
#: What a program finds imported, as in the benchmark's own runner; the last two put back what
#: others hide (pow, open).
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
).split()
_PRELUDE = "".join(f"import {name}\nfrom {name} import *\n" for name in _MODULES)
_PRELUDE += "sys.setrecursionlimit(50000)\n"
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)  # must come first
_CALL = """
import json
_given = [json.loads(line) for line in json.loads({given!r}).split("\\n")]
_result = {target}(*_given)
_result = list(_result) if isinstance(_result, tuple) else _result
assert _result == json.loads(json.loads({wanted!r})), "another result"
"""


def read(row: Row, index: int) -> Problem:
    tests = _tests(row["public_test_cases"]) + _tests(row.get("private_test_cases") or "[]")
    if not tests:
        raise ValueError("it has no tests")
    metadata = row.get("metadata") or "{}"
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    extra = {
        "tests": tests,
        "starter": str(row.get("starter_code") or ""),
        "function": metadata.get("func_name"),
    }
    return Problem(
        str(row.get("question_id", index)),
        str(row["question_content"]).strip(),
        f"{len(tests)} tests",
        group=str(row.get("difficulty", "")),
        extra=extra,
    )


def _tests(packed: Any) -> list[dict[str, str]]:
    if isinstance(packed, str):
        packed = json.loads(packed if packed.lstrip()[:1] in "[{" else unpack(packed))
    return [
        {"input": str(t["input"]), "output": str(t["output"]), "testtype": str(t["testtype"])}
        for t in packed
    ]


def unpack(text: str) -> str:
    """The JSON inside base64, zlib and a pickle that holds a string and nothing else."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        found = None
        for code, argument, _ in pickletools.genops(data):
            if code.name not in _STRING_ONLY:
                raise ValueError(f"its hidden tests are a pickle with {code.name}, not a string")
            found = argument if "UNICODE" in code.name else found
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"its hidden tests cannot be unpacked: {error}") from None
    if not isinstance(found, str):
        raise ValueError("its hidden tests are no string")
    return found


def ask(problem: Problem, examples: Sequence[Problem], chat: bool) -> str:
    starter = problem.extra["starter"]
    how = (
        f"Complete this code:\n\n```python\n{starter}\n```"
        if starter
        else "The program reads from standard input and prints to standard output."
    )
    end = "" if chat else "\n\n```python\n"
    return (
        f"{problem.question}\n\nWrite a Python program that solves this. {how}\n\nPut the whole "
        f"program into one fenced block of code.{end}"
    )


def score(text: str, problem: Problem) -> Verdict:
    text = after_thinking(text)
    blocks = code_blocks(text)
    # Text that was continued begins inside the block.
    program = blocks[-1] if blocks else text.partition("```")[0]
    if not program.strip():
        return Verdict(None, 0.0, "no code")
    for number, test in enumerate(problem.extra["tests"], 1):
        why = _failure(program, test, problem.extra["function"])
        if why:
            return Verdict(program, 0.0, f"test {number}: {why}")
    return Verdict(program, 1.0)


def _failure(program: str, test: dict[str, str], function: str | None) -> str:
    prepared = "".join(_FUTURE.findall(program)) + _PRELUDE + _FUTURE.sub("", program)
    if test["testtype"] == "functional":
        target = f"Solution().{function}" if "class Solution" in program else str(function)
        call = _CALL.format(
            given=json.dumps(test["input"]), wanted=json.dumps(test["output"]), target=target
        )
        outcome = run_code(f"{prepared}\n{call}", seconds=SECONDS)
        return "" if outcome.passed else outcome.why
    outcome = run_script(prepared, stdin=test["input"], seconds=SECONDS)
    if not outcome.passed:
        return outcome.why
    return "" if _same(outcome.output, test["output"]) else "another output"


def _same(found: str, wanted: str) -> bool:
    """Line by line, spaces at their ends aside; numbers as numbers."""
    a = [line.split() for line in found.strip().splitlines()]
    b = [line.split() for line in wanted.strip().splitlines()]
    if a == b:
        return True
    if [len(line) for line in a] != [len(line) for line in b]:
        return False
    try:
        pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
        return all(x == y or Decimal(x) == Decimal(y) for x, y in pairs)
    except InvalidOperation:
        return False


TASK = Task(
    name="livecodebench-v6",
    title="LiveCodeBench v6",
    read=read,
    ask=ask,
    score=score,
    hub=Hub(
        "livecodebench/code_generation_lite",
        files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
    ),
    stop=("\n```",),
    max_new_tokens=32768,
    runs_code=True,
    metric="pass@1",
)
