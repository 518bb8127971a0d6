"""Programs of a model: what they may do, and what ends them."""

import os
import time
from pathlib import Path

import pytest

from oscarkv.evaluation.tasks.sandbox import run_code, run_script


def test_a_program_that_ends_has_passed() -> None:
    assert run_code("assert 1 + 1 == 2").passed
    outcome = run_script("print(int(input()) * 2)", stdin="21\n")
    assert outcome.passed
    assert outcome.output == "42\n"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert False, 'wrong'", "AssertionError: wrong"),
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(0)", "left before its tests"),
        ("import os; os._exit(0)", "left before its tests"),
        ("raise SystemExit", "left before its tests"),
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("import sys\nfor _ in range(10**6): sys.stdout.write('x' * 100000)", ""),
    ],
)
def test_a_program_that_fails_says_why(program: str, why: str) -> None:
    outcome = run_code(program, seconds=20)
    assert not outcome.passed
    assert why in outcome.why


def test_time_is_limited_for_children_too() -> None:
    begin = time.monotonic()
    outcome = run_code("import subprocess, sys\nsubprocess.run(['sleep', '60'])", seconds=0.5)
    assert not outcome.passed
    assert "no end within 2 s" in outcome.why
    outcome = run_code("while True: pass", seconds=1)
    assert "1 s" in outcome.why  # of processor time; on a busy machine, of any
    assert time.monotonic() - begin < 30


def test_it_sees_neither_our_environment_nor_our_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCARKV_SECRET", "1")
    program = (
        "import os, sys\n"
        "assert 'OSCARKV_SECRET' not in os.environ\n"
        "open('mine', 'w').write('x')\n"
        "print(os.getcwd())"
    )
    outcome = run_script(program)
    assert outcome.passed, outcome.why
    folder = Path(outcome.output.strip())
    assert not folder.exists()
    assert str(folder) != os.getcwd()


def test_it_has_no_network_where_that_can_be_taken_away() -> None:
    """Or says so: containers may forbid the call that would take it away."""
    probe = (
        "import socket\n"
        "print(sorted(name for _, name in socket.if_nameindex()))\n"
        "s = socket.socket(); s.settimeout(1)\n"
        "try:\n    s.connect(('127.0.0.1', 9)); print('open')\n"
        "except OSError as error:\n    print(error.errno)"
    )
    shown = run_script(probe).output.splitlines()
    if shown[0] != "['lo']":
        pytest.skip("this system keeps the network")
    assert shown[1] == "101"  # unreachable: not even the loopback is up
