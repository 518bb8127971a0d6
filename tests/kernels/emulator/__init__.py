"""The CUDA kernels' own sources on the CPU, as C++: see machine.h.

What is written for the GPU is compiled by the host's compiler and run thread by thread, so that the
tests of the CUDA backend run where there is no GPU. Time is of no meaning here, and neither is what
memory looks like to other blocks meanwhile: blocks run one after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None
FLAGS = (
    "-std=c++17 -O1 -shared -fPIC -w -ffp-contract=off -fno-strict-aliasing "
    # Variants have functions and variables of the same names, which libraries must not share.
    "-fno-gnu-unique -fvisibility=hidden "
    # What a GPU would fault on, or would not notice.
    "-fsanitize=alignment,bounds -fno-sanitize-recover=all"
).split()
#: Few processors, so that a pair's work is cut into parts as on a GPU it is for long sequences.
PROCESSORS, SHARED_BYTES = 3, 228 * 1024


class EmulatedKernel:
    """One kernel of one variant. Every second launch runs warps in reverse."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._function = getattr(library, f"emulate_{name}")
        self._function.restype = ctypes.c_char_p
        self._name, self._reversed = name, False

    def launch(
        self, grid: tuple[int, int, int], threads: int, *arguments: Any, early: bool = False
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._reversed = not self._reversed
        error = self._function((ctypes.c_uint * 3)(*grid), threads, addresses, self._reversed)
        if error:
            raise AssertionError(f"{self._name}: {error.decode()}")


def source_for_the_host(name: str, macros: tuple[tuple[str, int], ...], kernels: list[str]) -> str:
    from oscarkv.kernels.cuda.compile import _source

    ptx, code = _source("ptx.cuh"), _source(name)
    assert code.count(ptx) == 1
    code = code.replace(ptx, (HERE / "instructions.h").read_text())
    assert "asm" not in re.sub(r"//.*", "", code), "PTX belongs into ptx.cuh"
    # Its size is not written there, and all kernels share the machine's.
    code = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];", r"\1* const \2 = (\1*)machine::shared;", code
    )
    defined = "".join(f"#define {key} {value}\n" for key, value in macros)
    exported = "".join(f"KERNEL({kernel})\n" for kernel in kernels)
    return f'#include "{HERE / "machine.h"}"\n{defined}{code}{exported}'


class Emulator:
    """Variants, compiled once each into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def load(
        self,
        source: str,
        kernels: tuple[tuple[str, int], ...],
        macros: tuple[tuple[str, int], ...],
        device: int | None,
    ) -> tuple[EmulatedKernel, ...]:
        """As `oscarkv.kernels.cuda.launch.load`."""
        assert all(shared <= SHARED_BYTES for _, shared in kernels)
        code = source_for_the_host(source, macros, [name for name, _ in kernels])
        library = self.library(code)
        return tuple(EmulatedKernel(library, name) for name, _ in kernels)

    def library(self, code: str) -> ctypes.CDLL:
        digest = hashlib.sha256(code.encode()).hexdigest()[:16]
        if digest not in self._libraries:
            path = self._folder / f"{digest}.so"
            text = path.with_suffix(".cpp")
            text.write_text(code)
            subprocess.run([str(COMPILER), *FLAGS, str(text), "-o", str(path)], check=True)
            self._libraries[digest] = ctypes.CDLL(str(path))
        return self._libraries[digest]


@contextmanager
def emulated(emulator: Emulator) -> Iterator[None]:
    """The CUDA backend's launches go to the emulator, and torch says what it asks of a GPU."""
    properties = SimpleNamespace(
        shared_memory_per_multiprocessor=SHARED_BYTES, multi_processor_count=PROCESSORS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of torch's CPU
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr("oscarkv.kernels.cuda.decode.load", emulator.load)
        patch.setattr("oscarkv.kernels.cuda.write.load", emulator.load)
        yield
