"""CUDA C++ -> machine code, with NVRTC through `cuda-core`: no toolkit, no headers, no build step.

The sources lie next to this file. A variant is one set of macros; its machine code is kept on disk
under a name made from everything that went into it, so that a process compiles only what no
process before it has.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from oscarkv.errors import OscarError

_FOLDER = Path(__file__).parent
_STANDARD = "c++17"


class CompileError(OscarError):
    """A kernel that NVRTC did not take, or that the driver did not load."""


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "oscarkv" / "kernels"


@lru_cache(maxsize=8)
def _source(name: str) -> str:
    """A source file with the project's own includes put in their place."""
    lines = []
    for line in (_FOLDER / name).read_text().splitlines():
        included = re.fullmatch(r'#include "(.+)"', line)
        lines.append(_source(included[1]) if included else line)
    return "\n".join(lines) + "\n"


def compile_source(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code (cubin) of one source file under some macros, for an `sm_90` or the like."""
    try:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=name,
            arch=arch,
            std=_STANDARD,
            define_macro=[(key, str(value)) for key, value in macros.items()],
        )
        code = Program(_source(name), "c++", options).compile("cubin").code
    except Exception as error:  # cuda-core raises its own classes, and NVRTC's log is the message
        listed = " ".join(f"{key}={value}" for key, value in macros.items())
        raise CompileError(
            f"NVRTC could not compile {name} for {arch} ({listed}): {error}"
        ) from error
    assert isinstance(code, bytes)
    return code


def compiled(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """As `compile_source`, from the disk cache where it has it."""
    path = cache_folder() / f"{Path(name).stem}-{arch}-{_digest(name, macros, arch)}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    code = compile_source(name, macros, arch)
    with suppress(OSError):  # a read-only home costs time at the next start, nothing else
        _write_atomically(path, code)
    return code


def _digest(name: str, macros: Mapping[str, int], arch: str) -> str:
    from importlib.metadata import version

    compiler = version("cuda-core"), version("cuda-bindings")  # the latter's NVRTC
    parts = [_source(name), arch, _STANDARD, *compiler, repr(sorted(macros.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
