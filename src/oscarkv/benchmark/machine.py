"""What a figure was measured on: versions, GPUs, driver."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from oscarkv import __version__

#: Distributions that matter to speed or that kernels work with; others' names for the same thing.
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm"),
    "cuda-core": ("cuda-core",),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
}


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    l2_bytes: int


def versions() -> dict[str, str | None]:
    """Versions by name; None: not installed. Imports none of them."""
    found: dict[str, str | None] = {"oscarkv": __version__, "python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    return [gpu(index) for index in range(torch.cuda.device_count())]


def gpu(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    return Gpu(
        index,
        facts.name,
        f"{facts.major}.{facts.minor}",
        facts.total_memory,
        facts.multi_processor_count,
        facts.L2_cache_size,
    )


def driver() -> str | None:
    """The NVIDIA driver's version, if it can be found out."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if found := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text.partition("\n")[0] + " "):
        return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().partition("\n")[0] or None


def processor() -> str:
    """The CPU's name, for runs without a GPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
