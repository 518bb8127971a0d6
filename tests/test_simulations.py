"""Each published method does what its paper says, on small examples, and its bits add up."""

import dataclasses
import math

import pytest
import torch
from helpers import generator
from torch import Tensor

from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.errors import RecipeError
from oscarkv.linalg import hadamard
from oscarkv.methods import get_transform, named, presets, simulations
from oscarkv.methods.kivi import GROUP, Kivi
from oscarkv.methods.kvquant import KVQuant, weighted_levels
from oscarkv.methods.rotatekv import RotateKV
from oscarkv.methods.simulation import LayerSamples, Simulation, round_uniform
from oscarkv.methods.turboquant import TurboQuant, normal_codebook, random_rotation
from oscarkv.recipe import Recipe

HEADS, DIM, TOKENS = 2, 64, 160


def rows(seed: int = 0, outliers: bool = False) -> Tensor:
    """Keys or values [H, T, d]; outliers: three channels that are always large."""
    x = torch.randn(HEADS, TOKENS, DIM, generator=generator(seed))
    if outliers:
        x[..., [3, 17, 40]] += torch.tensor([20.0, -15.0, 30.0])
    return x


def samples(keys: Tensor, values: Tensor, weight: float = 1.0) -> LayerSamples:
    ones = torch.full_like(keys, weight)
    return LayerSamples(0, keys, values, ones, ones)


def error(rounded: Tensor, exact: Tensor) -> float:
    return float((rounded - exact).square().mean() / exact.var())


def test_the_methods_are_these() -> None:
    assert set(simulations()) == {"kivi-2bit", "kvquant-3bit", "rotatekv-2bit", "turboquant-3bit"}
    assert "saw-int4" in presets()
    assert not set(simulations()) & set(presets())


@pytest.mark.parametrize("name", ["kivi-2bit", "kivi-2bit-alone", "kvquant-3bit"])
def test_a_simulated_method_cannot_become_an_artifact(name: str) -> None:
    with pytest.raises(RecipeError, match=r"is simulated: .* not calibrated, served or saved"):
        Recipe.named(name)


def test_names_with_and_without_windows() -> None:
    ours = Recipe()
    for name in simulations():
        method, alone = named(name), named(f"{name}-alone")
        assert (method.sink, method.recent) == (ours.sink, ours.recent)
        assert (alone.sink, alone.recent) == method.own_windows  # type: ignore[union-attr]
        assert alone.name == f"{name}-alone"
    saw = named("saw-int4-alone")
    assert isinstance(saw, Recipe)
    assert (saw.sink, saw.recent, saw.key_bits) == (0, 1, 4)
    with pytest.raises(RecipeError, match="unknown recipe 'nothing'"):
        named("nothing-alone")


# -- bits, counted by hand -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "heads", "dim", "expected"),
    [
        ("kivi-2bit", 8, 128, 2 + 32 / 32),
        ("kivi-2bit", 3, 64, 2 + 32 / 32),
        ("turboquant-3bit", 8, 128, 3 + 16 / 128),
        ("turboquant-3bit", 3, 64, 3 + 16 / 64),
        ("rotatekv-2bit", 8, 128, 2 + 32 / 128),
        # 1 % of 16 + 16 bits; a token's values share one scale and minimum of 16 bits.
        ("kvquant-3bit", 8, 128, 3 + (0.32 + 2 * 5 / 1024 * 32 + 32 / 1024) / 2),
    ],
)
def test_history_bits(name: str, heads: int, dim: int, expected: float) -> None:
    assert simulations()[name].history_bits(heads, dim) == pytest.approx(expected)


def test_saw_is_the_published_4_25_bits() -> None:
    assert Recipe.named("saw-int4").history_bits(128) == 4.25


def test_bits_at_a_length_count_windows_and_waiting_groups() -> None:
    length = 131072
    kivi = simulations()["kivi-2bit"]
    exact = (64 + 256 + 15.5) / length
    assert kivi.bits(8, 128) == pytest.approx(3 * (1 - exact) + 16 * exact)
    assert kivi.bits(8, 128, length=100) == 16
    turbo = simulations()["turboquant-3bit"]
    assert turbo.bits(8, 128) == pytest.approx(3.125 + (16 - 3.125) * 320 / length)


# -- what they do --------------------------------------------------------------------------------


def test_round_uniform_is_exact_on_its_own_grid() -> None:
    x = torch.tensor([[-1.0, 0.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert torch.equal(round_uniform(x, 2), x)
    assert round_uniform(torch.tensor([0.0, 0.4, 0.6, 3.0]), 2).tolist() == [0.0, 0.0, 1.0, 3.0]


def test_kivi_groups_keys_over_tokens_and_values_over_channels() -> None:
    kivi = Kivi(name="k")
    keys, values = rows(1, outliers=True), rows(2)
    rounded = kivi.keys(keys)
    block = keys[1, GROUP : 2 * GROUP, 17]
    assert torch.equal(rounded[1, GROUP : 2 * GROUP, 17], round_uniform(block, 2))
    assert len(rounded[0, :GROUP, 5].unique()) <= 4
    assert torch.equal(kivi.values(values)[0, 7, 32:], round_uniform(values[0, 7, 32:], 2))
    # A group that is not full yet is as it was.
    part = kivi.keys(keys[:, : GROUP + 5])
    assert torch.equal(part[:, GROUP:], keys[:, GROUP : GROUP + 5])
    assert torch.equal(part[:, :GROUP], rounded[:, :GROUP])


def test_kivi_does_not_mind_outlier_channels() -> None:
    kivi, plain, large = Kivi(name="k"), rows(1), rows(1, outliers=True)
    with_outliers = float((kivi.keys(large) - large).square().mean())
    without = float((kivi.keys(plain) - plain).square().mean())
    assert with_outliers == pytest.approx(without, rel=0.02)
    assert float((round_uniform(large, 2) - large).square().mean()) > 10 * with_outliers


def test_turboquant_codebook_is_lloyd_max() -> None:
    two = normal_codebook(1)
    assert two.tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    four = [-1.5104, -0.4528, 0.4528, 1.5104]
    assert normal_codebook(2).tolist() == pytest.approx(four, abs=1e-4)
    eight = [0.2451, 0.7560, 1.3439, 2.1520]
    assert normal_codebook(3)[4:].tolist() == pytest.approx(eight, abs=1e-4)


def test_turboquant_keeps_norms_and_spreads_spikes() -> None:
    x = rows(3)
    turbo = TurboQuant(name="t").fit(samples(x, x))
    for side in (turbo.keys, turbo.values):
        decoded = side(x)
        torch.testing.assert_close(decoded.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
        # 3-bit Lloyd-Max leaves 3.45 % of a normal row; a little more with the norm restored.
        assert 0.03 < float((decoded - x).square().sum() / x.square().sum()) < 0.045
    spike = torch.zeros(1, 1, DIM)
    spike[..., 5] = 7
    assert float((turbo.keys(spike) - spike).norm() / 7) < 0.25
    rotation = random_rotation(DIM, 3)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(DIM), atol=1e-5, rtol=0)
    assert torch.equal(rotation, random_rotation(DIM, 3))
    assert bool(turbo.keys(torch.zeros(1, 1, DIM)).isfinite().all())


def test_rotatekv_turns_over_heads_and_sorts_channels() -> None:
    keys, values = rows(4, outliers=True), rows(5)
    keys[1] = rows(6)[1]  # outliers in one head only: turned, they are in every channel
    fitted = RotateKV(name="r").fit(samples(keys, values))
    assert fitted.across.shape == (HEADS * DIM, HEADS * DIM)
    turned = keys.transpose(0, 1).flatten(1) @ hadamard(HEADS * DIM).float()
    sums = turned.sum(0)[fitted.order]
    assert bool((sums.diff() >= 0).all())
    first = turned[:, fitted.order][:, :DIM]
    expected = round_uniform(first, 2)
    again = (fitted.keys(keys).transpose(0, 1).flatten(1) @ fitted.across)[:, fitted.order]
    torch.testing.assert_close(again[:, :DIM], expected, atol=1e-3, rtol=1e-3)
    # Sorting pays: outliers that the rotation leaves behind share their parameters.
    unsorted = dataclasses.replace(fitted, order=torch.arange(HEADS * DIM))
    assert error(fitted.keys(keys), keys) < error(unsorted.keys(keys), keys)
    h = hadamard(DIM).float()
    torch.testing.assert_close(fitted.values(values), round_uniform(values @ h, 2) @ h.T)


def test_kvquant_levels_are_weighted_k_means() -> None:
    x = torch.tensor([-1.0, -0.9, 0.0, 0.1, 0.9, 1.0])
    same = torch.ones(6)
    assert weighted_levels(x, same, 3).tolist() == pytest.approx([-0.95, 0.05, 0.95])
    heavy = torch.tensor([1.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    assert weighted_levels(x, heavy, 3).tolist() == pytest.approx([-0.95, 0.01, 0.95])


def test_kvquant_keeps_outliers_and_scales_channels() -> None:
    keys, values = rows(6, outliers=True), rows(7)
    values[0, 11, 5] = 50.0
    method = KVQuant(name="k")
    fitted = method.fit(samples(keys, values))
    rounded = fitted.keys(keys)
    outside = (keys < fitted.low) | (keys > fitted.high)
    assert 0 < float(outside.float().mean()) < 0.02
    assert torch.equal(rounded[outside], keys[outside].half().float())
    for channel in (3, 5):
        inside = rounded[0, ~outside[0, :, channel], channel]
        assert len(inside.unique()) <= 8
    assert float(fitted.values(values)[0, 11, 5]) == 50.0
    assert error(rounded, keys) < 0.002  # most of the variance is the outlier channels' means
    plain = rows(8)
    fitted = method.fit(samples(plain, plain))
    assert error(fitted.keys(plain), plain) < 0.05
    assert error(fitted.values(plain), plain) < 0.05


def test_saw_turns_keys_in_blocks() -> None:
    for dim in (64, 256):
        blank = LayerStatistics.blank(0, 2, dim, torch.device("cpu"))
        turns = get_transform("block-hadamard").fit(blank, "key", Recipe.named("saw-int4"))
        block = min(dim, 128)
        expected = torch.block_diag(*[hadamard(block)] * (dim // block))
        assert torch.equal(turns[1], expected)
    assert Recipe.named("saw-int4").value_transform == "identity"


def test_order_of_errors() -> None:
    """On normal rows, more bits are better, and Lloyd-Max beats min/max at the same bits."""
    x = rows(9)
    fits = {name: method.fit(samples(x, x)) for name, method in simulations().items()}
    errors = {name: error(fitted.values(x), x) for name, fitted in fits.items()}
    assert errors["turboquant-3bit"] < errors["kivi-2bit"] < errors["rotatekv-2bit"]
    assert errors["kvquant-3bit"] < errors["kivi-2bit"]


def test_every_method_is_a_simulation_that_says_what_it_needs() -> None:
    for method in simulations().values():
        assert isinstance(method, Simulation)
        assert method.needs in ("", "samples", "gradients")
