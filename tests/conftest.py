"""Test set-up, the environment first: it must be set before torch starts."""

import os

# Some hosts advertise AMX without allowing it; oneDNN's bf16 matmul then dies with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["COLUMNS"] = "120"  # tables and lines are cut and wrapped alike, wherever tests run

import pytest
import torch

GPU = torch.cuda.is_available() and torch.version.cuda is not None
if not GPU:  # Triton kernels then run on CPU tensors; read when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests are skipped without one; with one, `compiled` tests are `gpu` tests too."""
    for item in items:
        if GPU and "compiled" in item.keywords:
            item.add_marker(pytest.mark.gpu)
        elif not GPU and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU is visible to torch"))


@pytest.fixture(autouse=True)
def one_thread_unless_slow(request: pytest.FixtureRequest) -> None:
    """Tests use tiny tensors: threads only wait for each other, on a shared machine for seconds."""
    torch.set_num_threads((os.cpu_count() or 1) if "slow" in request.keywords else 1)
