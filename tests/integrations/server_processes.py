"""Engines and servers in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def run_script(
    folder: Path, script: str, arguments: Any, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A script that gets its arguments as JSON, for engines that leave traces in their process."""
    file = folder / "engine.py"
    file.write_text(script)
    return subprocess.run(
        [sys.executable, str(file), json.dumps(arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


class ServerProcess:
    """A command that serves at `port`, and what it writes to `log`."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.command: list[str] = []
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        environment = os.environ | self.environment
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 300
        while True:
            try:
                self.get("/health")
                return self
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise AssertionError(self.log.read_text()[-3000:]) from None
                time.sleep(0.5)

    def __exit__(self, *error: Any) -> None:
        self.process.terminate()
        self.process.wait(60)

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return str(got.read().decode())
