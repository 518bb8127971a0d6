"""The steps that GPU tests are made of: what they call unread is unread, and nothing else."""

import pytest
import torch
from kernels.steps import Guarded, Shape, make_step, poisoned, readable

CPU = torch.device("cpu")
LENGTHS, COUNTS = [1, 0, 9, 40, 70, 33], [1, 0, 3, 1, 4, 0]


@pytest.mark.parametrize("sliding_window", [None, 5, 30])
@pytest.mark.parametrize("parameters", ["fp16", "log8", "log8-symmetric"])
def test_the_oracle_reads_nothing_that_is_poisoned(parameters: str, sliding_window) -> None:
    step = make_step(
        Shape(64, 32, parameters, 48, torch.float16, 2),
        LENGTHS, COUNTS, device=CPU, sink=4, recent=8, sliding_window=sliding_window,
    )  # fmt: skip
    expected = step.expected()
    masks = readable(step.seq_lens[:, None], torch.tensor(COUNTS)[:, None], step.clean)
    packed, _ = masks
    assert bool(packed.any()) == (sliding_window != 5)  # less than the recent window
    tables = (step.history_table, step.window_table)
    again = poisoned(step.clean, *masks, *tables)
    assert torch.equal(again.history, step.layer.history)
    # Zeros in its place, since the oracle multiplies what it does not read by zero.
    step.clean = poisoned(step.clean, *masks, *tables, poison=(0, 0.0))
    torch.testing.assert_close(step.expected(), expected, rtol=1e-12, atol=1e-12)
    for section in step.layer.layout.sections(step.layer.history):  # and the rest is
        assert bool((section[0] == 0xFF).all())
    assert bool(step.layer.window[0].isnan().all())
    assert bool(step.q[step.tokens :].isnan().all())


def test_guards_notice_a_write() -> None:
    guarded = Guarded(torch.zeros(3, 4, dtype=torch.bfloat16), guard=64)
    guarded.tensor.fill_(1)
    assert guarded.intact()
    guarded.buffer[63] = 0
    assert not guarded.intact()
