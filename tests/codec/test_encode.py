"""Rows to codes: the one definition, and the properties that make it the only one."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from codec_reference import encode as reference_encode
from helpers import generator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscarkv.codec import RowCodec, parameters
from oscarkv.codec.encode import REFINED_SCALE, _sqrt
from oscarkv.recipe import GAINS, PARAMETER_BITS, REFINED_BITS, Recipe

BASE = 2.0**-10
FORMATS = sorted(PARAMETER_BITS)
least_squares = st.builds(
    RowCodec,
    bits=st.sampled_from((2, 3, 4)),
    groups=st.sampled_from((1, 2, 4)),
    parameter_format=st.sampled_from(FORMATS),
    fit=st.just("least-squares"),
    clip=st.just(0.0),
    gain=st.sampled_from(GAINS),
)
minmax = st.builds(
    RowCodec,
    bits=st.sampled_from((2, 3, 4)),
    groups=st.sampled_from((1, 2, 4)),
    parameter_format=st.sampled_from(("fp16", "log8")),
    fit=st.just("minmax"),
    clip=st.sampled_from((0.0, 0.5, 0.92, 0.96, 1.0)),
    gain=st.just(0.0),
)
codecs = st.one_of(least_squares, minmax)
refined = st.builds(
    RowCodec,
    bits=st.sampled_from(REFINED_BITS),
    groups=st.just(1),
    parameter_format=st.sampled_from(FORMATS),
    fit=st.just("least-squares"),
    clip=st.just(0.0),
    gain=st.sampled_from(GAINS),
    refined=st.just(True),
)
split = st.builds(
    lambda bits, gain: RowCodec(
        bits, 2, "log8-symmetric", "least-squares", 0.0, gain, refined=True
    ),
    st.sampled_from(REFINED_BITS),
    st.sampled_from(GAINS),
)
every = st.one_of(codecs, refined, split)
rows_of = st.builds(
    lambda dim, seed, size, shift, tail: random_rows(6, dim, seed, size, shift, tail),
    dim=st.sampled_from((64, 80, 96, 128, 192)),
    seed=st.integers(0, 10**6),
    size=st.sampled_from((1e-30, 1e-4, 1.0, 37.5, 1e30)),
    shift=st.sampled_from((0.0, 0.7, -40.0)),
    tail=st.sampled_from((1.0, 3.0)),
)


def random_rows(
    count: int, dim: int, seed: int = 0, size: float = 1.0, shift: float = 0.0, tail: float = 1.0
) -> Tensor:
    """Rows around `shift`, with heavier tails for larger `tail`."""
    noise = torch.randn(count, dim, generator=generator(seed))
    return (noise * noise.abs() ** (tail - 1) + shift) * size


def encode(codec: RowCodec, rows: Tensor) -> tuple[Tensor, Tensor]:
    return codec.encode(rows, torch.full(rows.shape[:-1], BASE))


def decode(codec: RowCodec, codes: Tensor, stored: Tensor) -> Tensor:
    return codec.decode(codes, stored, torch.full(codes.shape[:-1], BASE))


def plain(
    bits: int = 2, fmt: str = "fp16", gain: float = 0.0, fit: str = "least-squares", clip: float = 0
) -> RowCodec:
    return RowCodec(bits, 1, fmt, fit, clip, gain)


# -- the definition ------------------------------------------------------------------------------


@given(every, rows_of)
@settings(deadline=None, max_examples=80)
@np.errstate(over="ignore")
def test_codes_and_parameters_equal_the_written_definition(codec: RowCodec, rows: Tensor) -> None:
    codes, stored = encode(codec, rows)
    for row in range(2):
        expected, parameter_bytes = reference_encode(rows[row].numpy(), *astuple(codec), BASE)
        assert bytes(stored[row].tolist()) == parameter_bytes
        assert codes[row].tolist() == expected


def test_a_hand_computed_row() -> None:
    # Four values 0 1 2 3 (times 1/2, plus 1), four times each: already on a grid of 4 levels.
    #   middle = (1 + 2.5) / 2 = 1.75, half = 0.75, unit = 2^-1 2^-10 = 2^-11
    #   X = (x - 1.75) 2048 = -1536, -512, 512, 1536; sum X = 0, sum X^2 = 8 (1536^2 + 512^2)
    #   deviation = sqrt(16 sum X^2) / 16 = 1144.9, first scale 0.9957 * 1144.9 = 1139.9
    #   first thresholds -1139.9, 0, 1139.9: codes 0 1 2 3, as they should be, in every round
    #   cov = 16 sum(cX) - 0 = 16 * 4 (-512 + 2 * 512 + 3 * 1536) = 327680
    #   den = 16 * 4 * 14 - 24^2 = 320, S = 1024, LO = (0 - 1024 * 24) / 16 = -1536
    #   s = 1024 / 2048 = 0.5, lo = -1536 / 2048 + 1.75 = 1.0;  no error, so the gain is 1:
    #   ratio = (16 * 8 (1536^2 + 512^2)) * 320 / 327680^2 = 335544320 * 320 / 327680^2 = 1
    row = torch.tensor([0.0, 1.0, 2.0, 3.0] * 4) / 2 + 1
    for gain in GAINS:
        codes, stored = encode(plain(gain=gain), row)
        assert codes.tolist() == [0, 1, 2, 3] * 4
        assert stored.view(torch.float16).tolist() == [0.5, 1.0]
        assert torch.equal(decode(plain(gain=gain), codes, stored), row)
    # As 8-bit parameters: s = 2^(-10 + 144/16), lo = 64 s / 32.
    assert encode(plain(fmt="log8"), row)[1].tolist() == [144, 64]


@given(codecs, rows_of)
@settings(deadline=None, max_examples=40)
def test_without_gain_codes_are_the_nearest_levels_of_the_stored_grid(codec, rows) -> None:
    codec = RowCodec(
        codec.bits, codec.groups, codec.parameter_format, codec.fit, codec.clip, gain=0.0
    )
    codes, stored = encode(codec, rows)
    base = torch.full((rows.shape[0], 1), BASE)
    s, lo = parameters.load(stored, codec.parameter_format, codec.levels, base)
    x = rows.unflatten(-1, (codec.groups, -1))
    level = (x - lo[..., None]) / s[..., None] + 0.5
    nearest = level.floor().clamp(0, codec.levels - 1).to(torch.uint8).flatten(-2)
    # A threshold is rounded, and so is lo, which least squares takes about the row's center
    # and back: next to a threshold either code may be given.
    slack = 4e-7 * (x.abs().amax(-1, keepdim=True) / s[..., None] + 1)
    tie = ((level - level.round()).abs() <= slack).flatten(-2)
    assert bool(((codes == nearest) | tie).all())


def test_square_roots_are_correctly_rounded() -> None:
    x = torch.linspace(0.8, 1.5, 20001)
    assert _sqrt(x).numpy().tolist() == np.sqrt(x.numpy()).tolist()


# -- independence --------------------------------------------------------------------------------


@given(every, rows_of, st.permutations(range(6)))
@settings(deadline=None, max_examples=30)
def test_a_row_is_encoded_alike_alone_in_any_batch_and_in_any_order(codec, rows, order) -> None:
    codes, stored = encode(codec, rows)
    for row in (0, 5):
        alone_codes, alone_stored = encode(codec, rows[row])
        assert torch.equal(alone_codes, codes[row])
        assert torch.equal(alone_stored, stored[row])
    shuffled_codes, shuffled_stored = encode(codec, rows[order].view(2, 3, -1))
    assert torch.equal(shuffled_codes.flatten(0, 1), codes[order])
    assert torch.equal(shuffled_stored.flatten(0, 1), stored[order])


@given(codecs, rows_of, st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_permuting_channels_permutes_codes_and_leaves_parameters(codec, rows, seed) -> None:
    codec = RowCodec(codec.bits, 1, codec.parameter_format, codec.fit, codec.clip, codec.gain)
    order = torch.randperm(rows.shape[-1], generator=generator(seed))
    codes, stored = encode(codec, rows)
    permuted_codes, permuted_stored = encode(codec, rows[:, order])
    assert torch.equal(permuted_stored, stored)
    assert torch.equal(permuted_codes, codes[:, order])


@given(least_squares, st.sampled_from(GAINS), rows_of)
@settings(deadline=None, max_examples=25)
def test_keys_and_values_encoded_together_equal_two_calls(codec, other_gain, rows) -> None:
    values = RowCodec(
        codec.bits, codec.groups, codec.parameter_format, codec.fit, codec.clip, other_gain
    )
    assert codec.shares_grid(values)
    base = torch.tensor([BASE, BASE * 4])[:, None].expand(2, 6)
    codes, stored = codec.encode_with(values, rows, rows.flip(0) * 1.5, base)
    for side, (one, x) in enumerate(((codec, rows), (values, rows.flip(0) * 1.5))):
        alone_codes, alone_stored = one.encode(x, base[side])
        assert torch.equal(codes[side], alone_codes)
        assert torch.equal(stored[side], alone_stored)


@given(refined, rows_of)
@settings(deadline=None, max_examples=40)
def test_a_second_digit_divides_the_step_by_the_levels_and_the_last_quarter_is_not_looked_at(
    codec, rows
):
    quarter = rows.shape[-1] // 4
    codes, stored = encode(codec, rows)
    other = torch.cat([rows[:, :-quarter], rows[:, :quarter]], -1)
    assert torch.equal(codes, encode(codec, other)[0])
    x, levels = rows[:, :quarter] * REFINED_SCALE[codec.bits], codec.levels
    base = torch.full((rows.shape[0], 1), BASE)
    s, lo = parameters.load(stored, codec.parameter_format, codec.levels, base)
    read = decode(codec, codes, stored)
    both = read[:, :quarter] + read[:, -quarter:] / levels
    inside = (x >= lo - s / 2) & (x <= lo + (levels - 0.5) * s)
    slack = 1e-6 * (x.abs().amax(-1, keepdim=True) + lo.abs() + s)
    # Half a small step, but for the offset of the second digits' grid from the middle of what the
    # first ones leave.
    shift = (lo + (levels - 1) / 2 * s).abs() / levels
    assert bool(((both - x).abs() <= s / (2 * levels) + shift + slack)[inside].all())
    # Rows about zero, of a size whose scale can be stored, are within reach of the two digits.
    ordinary = (rows.mean(-1).abs() < rows.std(-1)) & (rows.abs().amax(-1) < 2.0**5)
    assert bool((inside.float().mean(-1) > 0.7)[ordinary].all())


@given(split, rows_of)
@settings(deadline=None, max_examples=40)
def test_with_split_scales_two_digits_reach_the_largest_number(codec, rows) -> None:
    quarter = rows.shape[-1] // 4
    codes, stored = encode(codec, rows)
    other = rows.clone()
    other[:, quarter : 2 * quarter] = rows[:, -quarter:]
    assert torch.equal(codes, encode(codec, other)[0])  # that quarter is not looked at
    once = replace(codec, groups=1, refined=False)
    assert torch.equal(codes[:, 2 * quarter :], encode(once, rows[:, 2 * quarter :])[0])
    x, read = rows[:, :quarter], decode(codec, codes, stored)
    both = read[:, :quarter] + read[:, quarter : 2 * quarter] / codec.levels
    largest = x.abs().amax(-1, keepdim=True)
    storable = (largest > 2.0**-8) & (largest < 2.0**5)
    # Half a step of 2 bits; with 3, that of stored scales (an octave has 16) is the coarser one.
    share = {2: 0.07, 3: 0.023}[codec.bits]
    assert bool(((both - x).abs() <= largest * share)[storable.expand_as(x)].all())


def test_only_codecs_that_differ_in_gain_share_a_grid() -> None:
    def shared(recipe: Recipe) -> bool:
        return RowCodec.for_keys(recipe, 128).shares_grid(RowCodec.for_values(recipe, 128))

    even = Recipe(refine_keys=False)
    assert shared(even)
    assert not shared(Recipe())  # refined keys are fitted on three quarters of a row
    assert shared(Recipe(key_bits=4, value_bits=4))
    assert not shared(even.replace(value_bits=4))
    assert not shared(Recipe.named("paper"))


# -- awkward rows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "fit"),
    [*((fmt, "least-squares") for fmt in FORMATS), ("fp16", "minmax"), ("log8", "minmax")],
)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e30, -1e30, 1e-38, 1e-44])
def test_constant_rows_give_no_nan_and_come_back(value: float, fmt: str, fit: str) -> None:
    row = torch.full((64,), value)
    codec = plain(fmt=fmt, fit=fit, gain=0.0 if fit == "minmax" else 1.0)
    codes, stored = encode(codec, row)
    decoded = decode(codec, codes, stored)
    assert bool(torch.isfinite(decoded).all())
    if 1e-3 < abs(value) < 1e3:
        assert torch.allclose(decoded, row, rtol=0.03)
    if fmt == "fp16":
        assert stored.view(torch.float16)[0].item() == parameters.SMALLEST_FP16
    elif value == 0:
        assert stored[0] == 0  # the smallest scale


@given(
    every,
    st.sampled_from((1e-44, 1e-38, 1e-30, 1e30, 3e38)),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=30)
def test_huge_tiny_and_spiked_rows_give_finite_numbers(codec, size, seed) -> None:
    rows = torch.rand(4, 64, generator=generator(seed)) * 2 - 1
    rows[1] = 0
    rows[1, seed % 64] = 1
    rows[2:] *= size
    codes, stored = encode(codec, rows)
    assert int(codes.max()) < codec.levels
    assert bool(torch.isfinite(decode(codec, codes, stored)).all())


# -- quality -------------------------------------------------------------------------------------


def squared_errors(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Of least squares and of min/max, per row."""
    codecs = plain(bits), plain(bits, fit="minmax")
    fitted, ranged = ((decode(c, *encode(c, rows)) - rows).square().sum(-1) for c in codecs)
    return fitted, ranged


@given(st.integers(0, 10**6), st.sampled_from((64, 128)), st.sampled_from((0.0, 0.7, -3.0)))
@settings(deadline=None, max_examples=20)
def test_least_squares_beats_minmax_on_every_2_bit_row(seed: int, dim: int, shift: float) -> None:
    fitted, ranged = squared_errors(random_rows(8, dim, seed, shift=shift), 2)
    assert bool((fitted <= ranged).all())


@pytest.mark.parametrize(
    ("bits", "dim", "tail", "share"),
    [
        (2, 128, 1.0, 0.5),
        (2, 64, 2.0, 0.5),
        (3, 64, 1.0, 0.85),
        (3, 128, 2.0, 0.8),
        (4, 128, 1.0, 1),
    ],
)
def test_least_squares_beats_minmax_on_average(bits, dim, tail, share) -> None:
    fitted, ranged = squared_errors(random_rows(400, dim, shift=0.7, tail=tail), bits)
    assert float(fitted.sum()) < share * float(ranged.sum())


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("gain", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("bits", REFINED_BITS)
def test_two_digits_leave_an_eighth_of_the_error_of_one(bits, gain, fmt, dim) -> None:
    quarter, rows = dim // 4, random_rows(1000, dim)
    codec = replace(plain(bits, fmt, gain), refined=True)
    read = decode(codec, *encode(codec, rows))
    two = (read[:, :quarter] + read[:, -quarter:] / codec.levels) / REFINED_SCALE[bits]
    of_two = (two - rows[:, :quarter]).square().mean()
    of_one = (read - rows)[:, quarter:-quarter].square().mean()
    assert float(of_two) < float(of_one) / 8


@pytest.mark.parametrize(("fmt", "bits"), [("fp16", 2), ("log8", 2), ("fp16", 4), ("log8", 3)])
def test_the_full_gain_makes_reconstruction_unbiased(fmt: str, bits: int) -> None:
    rows = random_rows(400, 128, shift=0.3)

    def share(gain: float) -> float:
        codec = plain(bits, fmt, gain)
        decoded = decode(codec, *encode(codec, rows))
        mean = rows.mean(-1, keepdim=True)
        kept = ((rows - mean) * (decoded - mean)).sum(-1) / (rows - mean).square().sum(-1)
        return float(kept.mean())

    assert share(1.0) == pytest.approx(1.0, abs=2e-3)
    if bits == 2:
        assert share(0.0) < 0.93  # what least squares alone loses: 10 % at 2 bits
        assert share(0.0) < share(0.5) < share(0.75) < share(1.0)


def test_codes_do_not_depend_on_the_gain_up_to_rounding_of_the_parameters() -> None:
    rows = random_rows(200, 128)
    without, with_gain = (encode(plain(gain=gain), rows)[0] for gain in (0.0, 1.0))
    assert float((without != with_gain).float().mean()) < 2e-3


@pytest.mark.parametrize(
    ("ratio", "dim", "clamped"), [(0.96, 128, 5), (0.92, 128, 10), (1.0, 64, 0)]
)
def test_clip_takes_the_threshold_at_index_ratio_times_d(ratio, dim, clamped) -> None:
    row = random_rows(1, dim)[0]
    threshold = row.abs().sort().values[min(int(ratio * dim), dim - 1)]
    assert int((row.abs() > threshold).sum()) == clamped
    _, stored = encode(plain(fit="minmax", clip=ratio), row)
    s, lo = stored.view(torch.float16).tolist()
    clipped = row.clamp(-threshold, threshold)
    assert lo == clipped.min().half().item()
    assert s == ((clipped.max() - clipped.min()) / 3).half().item()


def test_the_clip_threshold_is_of_the_whole_row_even_with_groups() -> None:
    row = torch.cat([torch.full((64,), 0.1), torch.linspace(5, 10, 64)])
    codec = RowCodec(2, 2, "fp16", "minmax", 0.5, 0.0)
    _, stored = encode(codec, row)  # index 64 of |x|: 5.0, so the second group is constant
    assert stored.view(torch.float16)[3].item() == 5.0
