"""Synthetic steps are valid: pages of their own, parameters in range, every kernel runs on them."""

import pytest
import torch

from oscarkv.benchmark import accuracy
from oscarkv.benchmark.cases import RECIPE, Case, gpu_cases
from oscarkv.benchmark.synthetic import SCALES, make_step
from oscarkv.codec import parameters
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.kernels.rows import bases, decode_tokens
from oscarkv.kernels.torch_backend import TorchBackend

CPU = torch.device("cpu")


@pytest.mark.parametrize("dim", [64, 128])
def test_parameters_are_in_range(dim: int) -> None:
    step = make_step(Case("decode", (4, 2, dim), (500, 90)), CPU)
    layer = step.layers[0]
    sections = layer.layout.sections(layer.history)
    for side, stored in enumerate(sections[2:]):
        base = bases(layer)[side][None, :, None, None]
        s, lo = parameters.load(stored, layer.layout.parameter_format, 4, base)
        assert SCALES[0] * 0.95 <= float(s.min()) < float(s.max()) <= SCALES[1] * 1.05
        assert -1.8 <= float((lo / s).min()) < float((lo / s).max()) <= -1.2
    assert sections[0].float().std() > 70  # codes are random bytes
    keys, values = decode_tokens(layer.history, layer)
    assert bool(keys.isfinite().all())
    assert 0.5 < float(values.std()) < 2


def test_transforms_are_inverses() -> None:
    step = make_step(Case("decode", (6, 2, 96), (40,)), CPU, layers=2)
    for layer in step.layers:
        t = layer.transforms
        assert t.value is not None
        assert t.value_inverse is not None
        eye = torch.eye(96).expand(2, -1, -1)
        torch.testing.assert_close(t.key @ t.query.mT, eye, atol=1e-5, rtol=0)
        torch.testing.assert_close(t.value @ t.value_inverse, eye, atol=1e-5, rtol=0)
    assert not torch.equal(step.layers[0].history, step.layers[1].history)
    folded = make_step(Case("decode", (6, 2, 96), (40,), folded=True), CPU).layers[0].transforms
    assert folded.value is None
    assert folded.value_inverse is None
    assert folded.value_mean is None


@pytest.mark.parametrize("new", [1, 4, 200])
def test_tables_give_every_page_once(new: int) -> None:
    case = Case("decode", (4, 2, 64), (1000, 321, 200), new, page_size=48)
    step = make_step(case, CPU)
    for table, pool in (
        (step.history_table, step.layers[0].history),
        (step.window_table, step.layers[0].window),
    ):
        used = table[table > 0]
        assert sorted(used.tolist()) == list(range(1, pool.shape[0]))
        assert used.tolist() != sorted(used.tolist())
    assert (step.history_table > 0).sum(1).tolist() == [21, 7, 5]
    for row, length in zip(step.window_table, case.lengths, strict=True):
        first = length - new
        read = set(range(RECIPE.sink)) | set(range(max(0, first - RECIPE.recent + 1), first + 1))
        read |= set(range(max(0, length - RECIPE.recent), length))
        held = {int(page) for page in (row > 0).nonzero()}
        assert {p // PAGE_QUANTUM for p in read if p < length} <= held
        assert max(held) == (length - 1) // PAGE_QUANTUM


def test_slots_point_at_the_last_tokens() -> None:
    case = Case("write", (4, 2, 64), (1000, 700), 100, page_size=48)
    step = make_step(case, CPU)
    slots = step.history_slots.view(2, 100)
    windows = step.window_slots.view(2, 100)
    for index, length in enumerate(case.lengths):
        for i in (0, 50, 99):
            position = length - 100 + i
            page = int(step.history_table[index, position // 48])
            assert int(slots[index, i]) == page * 48 + position % 48
            page = int(step.window_table[index, position // PAGE_QUANTUM])
            assert page > 0
            assert int(windows[index, i]) == page * PAGE_QUANTUM + position % PAGE_QUANTUM
    chunk = make_step(Case("write", (4, 2, 64), (900,), 900), CPU).window_slots
    assert int((chunk >= 0).sum()) == RECIPE.sink + RECIPE.recent
    assert int(chunk[RECIPE.sink]) == -1


@pytest.mark.parametrize("case", gpu_cases()[::2], ids=lambda case: case.name)
def test_the_oracle_agrees_with_itself(case: Case) -> None:
    """fp32 against fp64 over the table's own geometries, in small."""
    found = accuracy.check(TorchBackend(), case, CPU)
    assert found.good
    assert found.value < 1e-5


def test_wrong_results_are_found() -> None:
    class Wrong(TorchBackend):
        def decode(self, q, layer, out) -> None:
            super().decode(q, layer, out)
            out[0] *= 1.5

        def write(self, k, v, history_slots, window_slots, layer) -> None:
            super().write(k * 1.01, v, history_slots, torch.full_like(window_slots, -1), layer)
            if windows:
                super().write(k, v, torch.full_like(history_slots, -1), window_slots, layer)

    case = Case("decode", (4, 2, 64), (600, 90))
    assert not accuracy.check(Wrong(), case, CPU).good
    write = Case("write", (4, 2, 64), (600, 90))
    windows = True
    found = accuracy.check(Wrong(), write, CPU)
    assert (found.what, found.good) == ("codes that differ", False)
    windows = False
    found = accuracy.check(Wrong(), write, CPU)
    assert (found.what, found.good) == ("window rows that differ", False)

    class Silent(TorchBackend):
        def decode(self, q, layer, out) -> None:
            pass

    assert not accuracy.check(Silent(), case, CPU).good  # NaN
