"""Kernels run compiled if there is a GPU, and else on CPU tensors in Triton's interpreter."""

from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def backend() -> Any:
    """The CUDA backend, one for a file: its working memory is used again by every kind of batch."""
    from oscarkv.kernels.cuda.backend import CudaBackend

    return CudaBackend()
