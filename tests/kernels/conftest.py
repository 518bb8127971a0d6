"""Kernels run compiled if there is a GPU; else on CPU tensors: Triton's in its interpreter, CUDA
C++ in an emulator (emulator/machine.h)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.emulator import COMPILER, Emulator, emulated


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if COMPILER is None:
        pytest.skip("neither an NVIDIA GPU nor g++, which the emulator compiles kernels with")
    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The CUDA backend, one for a file: its working memory is used again by every kind of batch."""
    from oscarkv.kernels.cuda.backend import CudaBackend

    if torch.cuda.is_available():
        yield CudaBackend()
        return
    with emulated(request.getfixturevalue("emulator")):
        yield CudaBackend()
