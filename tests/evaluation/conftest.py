"""Tiny tensors are fastest on one thread, above all where the machine is busy."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if "slow" not in request.keywords:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
