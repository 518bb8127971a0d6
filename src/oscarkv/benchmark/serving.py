"""`oscarkv bench serving`: the same requests to several engines, one process after the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from oscarkv.artifact.files import write_atomically
from oscarkv.benchmark.serving_plan import MARK, EnginePlan

FORMAT = "oscarkv-serving-1"
MEASURED, FAILED = "measured", "failed"
#: Lines of an engine's own output that are kept for the case that it fails.
LOG_LINES = 40

Say = Callable[[str], None]


@dataclass
class Run:
    """What came of one engine. Figures say how contexts came about: `computed` or `real`."""

    name: str
    status: str = "not run"
    reason: str = ""
    started: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    first_token: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # the engine's last words, where it failed

    def take(self, event: dict[str, Any]) -> str:
        """Note one figure; returns it in words."""
        kind = event.pop("event")
        if kind == "started":
            self.started = event
            return f"holds {event['kv_tokens']:,} tokens, started in {event['seconds']:.0f} s"
        if kind == "steps":
            return self._take_steps(event)
        if kind == "first_token":
            self.first_token.append(event)
            return f"first token at {event['context']:,}: {_seconds(event)}"
        if kind == "load":
            self.loads.append(event)
            what = f"{event['requests']} requests, contexts {event['contexts']}"
            return f"{what}: {event['tokens_per_s']:,.0f} tokens/s"
        if kind == "failed":
            self.status, self.reason = FAILED, event["reason"]
            return f"failed: {self.reason}"
        self.status = MEASURED
        return "done"

    def _take_steps(self, event: dict[str, Any]) -> str:
        if event["status"] == MEASURED:
            event["tokens_per_s"] = event["batch"] / event["seconds"]
        self.steps.append(event)
        return f"step at {event['batch']}x{event['context']}: {_seconds(event)}"

    @property
    def kv_tokens(self) -> int | None:
        return self.started.get("kv_tokens")

    def step_seconds(self, batch: int, context: int) -> float | None:
        for row in self.steps:
            if (row["batch"], row["context"]) == (batch, context) and row["status"] == MEASURED:
                return float(row["seconds"])
        return None


def _seconds(event: dict[str, Any]) -> str:
    if event["status"] != MEASURED:
        return f"{event['status']}, {event['reason']}"
    return f"{event['seconds'] * 1e3:.4g} ms"


@dataclass
class ServingRecord:
    """Everything that is saved."""

    about: dict[str, Any]  # command, date, device, versions, model, settings
    runs: list[Run] = field(default_factory=list)

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.status == FAILED]

    def to_json(self) -> dict[str, Any]:
        runs = [{**vars(run), "kv_tokens": run.kv_tokens} for run in self.runs]
        return {"format": FORMAT, **self.about, "runs": runs}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ServingRecord:
        about = {name: value for name, value in data.items() if name not in ("format", "runs")}
        names = {item.name for item in fields(Run)}
        runs = [Run(**{k: v for k, v in run.items() if k in names}) for run in data["runs"]]
        return cls(about, runs)

    def save(self, path: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

        def write(part: Path) -> None:
            part.write_text(text, encoding="utf-8")

        write_atomically(path, write)


def bench_serving(
    plans: Sequence[EnginePlan],
    record: ServingRecord,
    *,
    timeout: float = 1800,
    save: Callable[[], None],
    say: Say,
) -> None:
    """Run the plans one after the other. `save` is called after every figure, so that a cut-off
    loses nothing."""
    for plan in plans:
        run = Run(plan.name)
        record.runs.append(run)
        say(f"{plan.name}: starting the engine")
        try:
            _run_engine(plan, run, timeout, save, say)
        except KeyboardInterrupt:
            run.status, run.reason = FAILED, "interrupted"
            save()
            raise
        save()


def _run_engine(
    plan: EnginePlan,
    run: Run,
    timeout: float,
    save: Callable[[], None],
    say: Say,
) -> None:
    log: deque[str] = deque(maxlen=LOG_LINES)
    done = said = False
    with _worker(plan, timeout) as (worker, expired):
        assert worker.stdout is not None
        for line in worker.stdout:
            mark, found, rest = line.partition(MARK)
            if not found or mark.strip():
                log.append(line.rstrip())
                continue
            event = json.loads(rest)
            done |= event["event"] == "done"
            said |= event["event"] == "failed"
            say(f"{plan.name}: {run.take(event)}")
            save()
        code = worker.wait()
    if done:
        return
    run.log = list(log)
    if said:
        return
    if expired.is_set():
        run.reason = f"stopped after {timeout:g} s"
    else:
        run.reason = f"the engine's process ended with {code}: {_last_error(log)}"
    run.status = FAILED
    say(f"{plan.name}: failed: {run.reason}")


@contextlib.contextmanager
def _worker(
    plan: EnginePlan, timeout: float
) -> Iterator[tuple[subprocess.Popen[str], threading.Event]]:
    """The engine's process and its children, gone when the block is left."""
    # In one process: the worker looks at the scheduler.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "kv_cache_memory_bytes" in plan.engine:
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would come first
    worker = subprocess.Popen(
        [sys.executable, "-m", "oscarkv.benchmark.serving_worker", plan.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,  # nothing is written; its end tells the worker that we are gone
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    expired = threading.Event()

    def stop() -> None:
        expired.set()
        _end(worker)

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        yield worker, expired
    finally:
        timer.cancel()
        _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    """The whole group: engine cores and ranks would otherwise keep the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _last_error(log: deque[str]) -> str:
    """The line that says most: the last one that names an error."""
    for line in reversed(log):
        if re.search(r"\b\w*(Error|Exception|Killed)\b", line):
            return line.strip()[-400:]
    return log[-1].strip()[-400:] if log else "it said nothing"
