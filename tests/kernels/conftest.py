"""Kernels run compiled if there is a GPU, and else on CPU tensors in Triton's interpreter."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
