"""Requests through vLLM: an engine in a process of its own for each setting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks.requests import Answer, Request, Sampling, Take
from oscarkv.evaluation.tasks.vllm_worker import MARK

#: Lines of an engine's own output that are kept for the case that it fails.
LOG_LINES = 40


@dataclass
class VllmEngine:
    """`engine`: arguments of `vllm.LLM`, the attention backend and our section among them."""

    model: str
    engine: dict[str, Any]
    say: Callable[[str], None] = lambda _: None
    log_file: Path | None = None
    started: dict[str, Any] = field(default_factory=dict)

    def answer(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None:
        asked = {
            "model": self.model,
            "engine": self.engine,
            "sampling": dataclasses.asdict(sampling),
            "requests": [dataclasses.asdict(request) for request in requests],
        }
        with tempfile.TemporaryDirectory(prefix="oscarkv-tasks-") as folder:
            plan = Path(folder) / "requests.json"
            plan.write_text(json.dumps(asked), encoding="utf-8")
            self._run(plan, take)

    def _run(self, plan: Path, take: Take) -> None:
        log: deque[str] = deque(maxlen=LOG_LINES)
        reason, done = "", False
        worker = subprocess.Popen(
            [sys.executable, "-m", "oscarkv.evaluation.tasks.vllm_worker", str(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,  # nothing is written; its end tells the worker that we are gone
            text=True,
            errors="replace",
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **os.environ},
            start_new_session=True,
        )
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                mark, found, rest = line.partition(MARK)
                if not found or mark.strip():
                    log.append(line.rstrip())
                    self._keep(line)
                    continue
                event = json.loads(rest)
                kind = event.pop("event")
                if kind == "answer":
                    take(Answer(**event))
                elif kind == "started":
                    self.started = event
                    self.say(
                        f"holds {event['kv_tokens']:,} tokens, started in {event['seconds']:.0f} s"
                    )
                elif kind == "failed":
                    reason = event["reason"]
                done |= kind == "done"
            code = worker.wait()
        finally:
            # The whole group: engine cores and ranks would otherwise keep the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        if not done:
            reason = reason or f"its process ended with {code}: {_last_error(log)}"
            raise OscarError(f"vLLM failed: {reason}")

    def _keep(self, line: str) -> None:
        if self.log_file is not None:
            with self.log_file.open("a", encoding="utf-8") as file:
                file.write(line)


def _last_error(log: Sequence[str]) -> str:
    """The line that says most: the last one that names an error."""
    for line in reversed(log):
        if re.search(r"\b\w*(Error|Exception|Killed)\b", line):
            return line.strip()[-400:]
    return log[-1].strip()[-400:] if log else "it said nothing"
