"""Stored scales and offsets: what is written is what is read, at every size of number."""

import re
from pathlib import Path

import pytest
import torch
from codec_reference import BOUNDS, GRID
from codec_reference import store as reference_store
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import float32

from oscarkv.codec import parameters
from oscarkv.codec.encode import _starts
from oscarkv.recipe import PARAMETER_BITS

FORMATS = sorted(PARAMETER_BITS)
LEVELS = (4, 8, 16)
scales = st.floats(0, 2.0**100, width=32)
offsets = st.floats(-(2.0**100), 2.0**100, width=32)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.flatten().tolist())


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("fmt", FORMATS)
@given(
    pairs=st.lists(st.tuples(scales, offsets), min_size=1, max_size=8), exponent=st.integers(-24, 8)
)
@settings(deadline=None, max_examples=25)
def test_store_equals_the_definition_and_load_returns_it(fmt, levels, pairs, exponent) -> None:
    s, lo = torch.tensor(pairs, dtype=torch.float32).unbind(-1)
    base = torch.tensor(2.0**exponent)
    packed, stored_s, stored_lo = parameters.store(s[:, None], lo[:, None], fmt, levels, base)
    assert packed.shape == (len(pairs), PARAMETER_BITS[fmt] // 8)
    for row, (one, other) in enumerate(zip(s.numpy(), lo.numpy(), strict=True)):
        expected, *_ = reference_store(one, other, fmt, levels, float32(2.0**exponent))
        assert as_bytes(packed[row]) == expected
    read_s, read_lo = parameters.load(packed, fmt, levels, base)
    assert torch.equal(read_s, stored_s)
    assert torch.equal(read_lo, stored_lo)
    assert bool(torch.isfinite(read_s).all() and torch.isfinite(read_lo).all())
    assert bool((read_s > 0).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_bytes_do_not_depend_on_the_shape(fmt: str) -> None:
    s, lo = torch.linspace(0.01, 3, 24), torch.linspace(-4, 4, 24)
    base = torch.tensor(2.0**-10)
    flat, *_ = parameters.store(s[:, None], lo[:, None], fmt, 4, base)
    grouped, *_ = parameters.store(s.view(2, 3, 4), lo.view(2, 3, 4), fmt, 4, base)
    assert grouped.shape == (2, 3, 4 * PARAMETER_BITS[fmt] // 8)
    assert as_bytes(grouped) == as_bytes(flat)


@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_scales_rise_with_the_scale(fmt: str) -> None:
    s = torch.logspace(-6, 5, 4000)
    _, stored, _ = parameters.store(s, torch.zeros_like(s), fmt, 4, torch.tensor(2.0**-10))
    assert bool((stored.diff() >= 0).all())
    assert len(stored.unique()) > 200


def test_log_scales_are_within_half_a_step() -> None:
    base = torch.tensor(2.0**-10)
    s = torch.logspace(-10, 5.9, 5000, base=2.0)
    _, stored, _ = parameters.store(s, torch.zeros_like(s), "log8-symmetric", 4, base)
    ratio = stored.double() / s.double()
    assert float(ratio.max()) <= 2 ** (1 / 32) + 1e-6
    assert float(ratio.min()) >= 2 ** (-1 / 32) - 1e-6


def test_every_stored_pattern_is_stored_as_itself() -> None:
    base = torch.tensor(2.0**-8)
    n = torch.arange(256).to(torch.uint8)[:, None]
    s, _ = parameters.load(n, "log8-symmetric", 4, base)
    again, _, _ = parameters.store(s, torch.zeros_like(s), "log8-symmetric", 4, base)
    assert torch.equal(again, n)
    z = torch.arange(-127, 128).to(torch.int8).view(torch.uint8)
    for levels in LEVELS:
        packed = torch.stack([torch.full_like(z, 100), z], -1)
        s, lo = parameters.load(packed, "log8", levels, base)
        again, _, _ = parameters.store(s, lo, "log8", levels, base)
        # |z| = 127 may need the next scale to be held exactly; everything else is a fixed point
        assert torch.equal(again[1:-1], packed[1:-1])


def test_the_step_of_a_2_bit_offset_is_one_thirty_second_of_the_scale() -> None:
    base = torch.tensor(1.0)
    packed = torch.tensor([[16, 256 - 48]], dtype=torch.uint8)  # n = 16: s = 2; z = -48
    s, lo = parameters.load(packed, "log8", 4, base)
    assert s.item() == 2.0
    assert lo.item() == 2.0 * -48 / 32


def test_the_grid_is_16_numbers_an_octave() -> None:
    values, bounds = parameters.log_grid("cpu")
    assert values.tolist() == GRID.tolist()
    assert bounds.tolist() == BOUNDS.tolist()
    assert torch.equal(values[16:], 2 * values[:-16])
    assert bool((values[:-1] < bounds).all() and (bounds < values[1:]).all())


def test_a_zero_scale_is_stored_as_the_smallest_one() -> None:
    zero, base = torch.zeros(1), torch.tensor(2.0**-10)
    _, s, _ = parameters.store(zero, zero, "fp16", 4, base)
    assert s.item() == parameters.SMALLEST_FP16 == 2.0**-14
    for fmt in ("log8", "log8-symmetric"):
        packed, s, _ = parameters.store(zero, zero, fmt, 4, base)
        assert packed[0] == 0
        assert s.item() == 2.0**-10


def test_bases_and_powers_are_exact() -> None:
    exponents = torch.tensor([-200, -126, -10, 0, 5, 127, 200], dtype=torch.int32)
    expected = [2.0 ** min(max(e, -126), 127) for e in exponents.tolist()]
    assert parameters.bases(exponents).tolist() == expected
    x = torch.tensor([1.0, 1.999, 2.0, 3.5, 2.0**-100, 1e30])
    assert parameters.power_below(x).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0**-100, 2.0**99]


def test_the_page_lists_the_constants_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    listed = re.findall(r"\b[0-9a-f]{8}\b", text)
    values, bounds = parameters.log_grid("cpu")
    constants = [values[:16], bounds[:16]]
    constants += [_starts(levels, "cpu") for levels in LEVELS]
    for levels in LEVELS:
        step = (levels - 1) / 96
        constants.append(torch.tensor([step, 127 * step]))
    expected = [f"{word:08x}" for c in constants for word in c.view(torch.int32).tolist()]
    assert sorted(listed) == sorted(expected)
