"""`sglang.launch_server` in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server_processes import TEMPLATE, ServerProcess

#: Whatever SGLang needs on a CPU.
ON_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph"),
    *("--skip-server-warmup", "--log-level", "warning"),
)


def command(model: Any, *arguments: str) -> list[str]:
    where = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(model.path))
    ours = ("--attention-backend", "oscarkv", "--oscarkv-artifact", str(model.artifact))
    return [*where, *ours, *ON_CPU, *arguments]


class Server(ServerProcess):
    """Of a TinyModel whose tokenizer is in its folder."""

    def __init__(self, model: Any, folder: Path, *arguments: str) -> None:
        super().__init__(folder / "server.log")
        (folder / "chat.jinja").write_text(TEMPLATE)
        self.command = command(
            model,
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"),
            *("--chat-template", str(folder / "chat.jinja"), "--enable-metrics", *arguments),
        )

    def state(self) -> dict[str, Any]:
        """Of the first scheduler."""
        return json.loads(self.get("/get_load"))[0]

    def arguments(self) -> dict[str, Any]:
        return json.loads(self.get("/server_info"))

    def metric(self, name: str) -> float:
        lines = [x for x in self.get("/metrics").splitlines() if x.startswith(f"sglang:{name}{{")]
        assert lines, f"SGLang has no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)
