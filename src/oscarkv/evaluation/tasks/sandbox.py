"""Code that a model wrote, in a process of its own with limits.

A fresh interpreter in an empty folder: limits on processor time, memory, file sizes and open files,
none of our environment, no network where the system lets us take it away, and an end after some
seconds. That stops accidents; it is no wall against code that means harm, so whoever runs tasks
with code does so in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MEMORY = 2 << 30
#: A busy machine may take this many times the processor's seconds.
PATIENCE = 4
OUTPUT = 4 << 20  # bytes of a file, and so of what is printed

#: Runs before the code does, in its process.
_LAUNCHER = """
import ctypes, os, resource, runpy, sys
seconds, memory, output = map(int, sys.argv[1:4])
def limit(kind, value):
    try:
        resource.setrlimit(kind, (value, value + (kind == resource.RLIMIT_CPU)))
    except (OSError, ValueError):
        pass
limit(resource.RLIMIT_CPU, seconds)
limit(resource.RLIMIT_AS, memory)
limit(resource.RLIMIT_FSIZE, output)
limit(resource.RLIMIT_NOFILE, 64)
limit(resource.RLIMIT_CORE, 0)
try:
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # a user and a network of its own
except (AttributeError, OSError):
    pass
limit(resource.RLIMIT_NPROC, 64)
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Outcome:
    passed: bool  # it came to its end
    output: str
    why: str = ""


def run_code(program: str, *, stdin: str = "", seconds: float = 10.0) -> Outcome:
    """Run a program to its last line: one that leaves before that, with exit(0) say, has failed
    the tests that stand there."""
    end = secrets.token_hex(16)
    return _run(f"{program}\nprint('\\n{end}', flush=True)\n", end, stdin, seconds)


def run_script(program: str, *, stdin: str = "", seconds: float = 10.0) -> Outcome:
    """Run a program that is judged by what it prints; it may leave as it likes."""
    return _run(program, None, stdin, seconds)


def _run(program: str, end: str | None, stdin: str, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="oscarkv-code-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        out, err = folder / "out", folder / "err"
        limits = [str(max(1, math.ceil(seconds))), str(MEMORY), str(OUTPUT)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _LAUNCHER, *limits],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": name, "TMPDIR": name, "LANG": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode(), timeout=PATIENCE * seconds)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed = out.read_bytes().decode("utf-8", "replace")
        if late:
            return Outcome(False, printed, f"no end within {PATIENCE * seconds:g} s")
        if process.returncode == -signal.SIGXCPU:
            return Outcome(False, printed, f"more than {seconds:g} s of processor time")
        if process.returncode:
            said = err.read_bytes().decode("utf-8", "replace").strip().splitlines()
            reason = said[-1][:200] if said else f"ended with {process.returncode}"
            return Outcome(False, printed, reason)
        if end is not None and not printed.endswith(f"\n{end}\n"):
            return Outcome(False, printed, "it left before its tests were done")
        return Outcome(True, printed)
