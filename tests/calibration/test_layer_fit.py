"""From statistics to transforms: position averaging, the published targets, the self-check."""

from typing import Any

import pytest
import torch
from calibration.dense import random_call

from oscarkv.artifact import reader_of
from oscarkv.calibration.fit import LayerCheck, average_positions, fit_layer, observe_checks
from oscarkv.calibration.statistics import AttentionCall, LayerStatistics
from oscarkv.codec.encode import REFINED_SCALE
from oscarkv.errors import CalibrationError
from oscarkv.linalg import bit_reversal, hadamard
from oscarkv.methods.balanced import centred_keys
from oscarkv.recipe import REFINED_BITS, Recipe

DIM = 8
SIZES = {"sink": 3, "recent": 5}


def observed(calls: list[AttentionCall], scores: bool = False) -> LayerStatistics:
    statistics = LayerStatistics(7, 3, 5, True)
    generator = torch.Generator().manual_seed(0)
    for call in calls:
        statistics.observe(call, generator)
    for call in calls if scores else ():
        statistics.observe_scores(call)
    return statistics


def rope(offsets: torch.Tensor) -> torch.Tensor:
    """Turns of the first six of eight dimensions, [n, d, d]."""
    angles = offsets.double()[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    turns = torch.eye(DIM, dtype=torch.float64).repeat(len(offsets), 1, 1)
    for pair in range(3):
        cos, sin = angles[:, pair].cos(), angles[:, pair].sin()
        turns[:, pair, pair] = turns[:, pair + 3, pair + 3] = cos
        turns[:, pair, pair + 3], turns[:, pair + 3, pair] = sin, -sin
    return turns


def test_average_positions_is_the_average_over_turned_text() -> None:
    calls = [random_call(seed) for seed in range(2)]
    offsets = torch.tensor([0, 3, 50, 400])
    averaged = average_positions(observed(calls), rope(offsets))
    turned = []
    for turn in rope(offsets):
        moved = [
            AttentionCall(
                (c.q.double() @ turn).float(), (c.k.double() @ turn).float(), c.v, c.o, c.scale
            )
            for c in calls
        ]
        turned.append(observed(moved))
    for name in ("read_keys", "read_queries"):
        second = torch.stack([getattr(s, name).second_moment for s in turned]).mean(0)
        first = torch.stack([getattr(s, name).mean for s in turned]).mean(0)
        torch.testing.assert_close(
            getattr(averaged, name).second_moment, second, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(getattr(averaged, name).mean, first, rtol=1e-4, atol=1e-5)
    # Centred last: the spread of the turning mean belongs to the covariance.
    within = torch.stack([centred_keys(s) for s in turned]).mean(0)
    assert (centred_keys(averaged) - within).diagonal(dim1=-2, dim2=-1).sum() > 0.1
    # Values do not turn.
    assert torch.equal(averaged.read_values.second, observed(calls).read_values.second)


def test_averaging_is_only_done_where_asked() -> None:
    statistics, turns = observed([random_call()]), rope(torch.tensor([0, 9]))
    plain = fit_layer(statistics, Recipe(**SIZES, average_positions=False), turns)
    assert torch.equal(plain.key, fit_layer(statistics, Recipe(**SIZES)).key)
    assert not torch.equal(plain.key, fit_layer(statistics, Recipe(**SIZES), turns).key)


# -- the published recipe ------------------------------------------------------------------------


def diagonalised(target: torch.Tensor) -> torch.Tensor:
    """(H P)^T L (H P): what R^T C R is for R = U H P, whatever the signs of U's columns."""
    values = torch.linalg.eigvalsh(target)
    order = torch.argsort(values, descending=True)
    permutation = torch.empty(DIM, dtype=torch.long)
    for i in range(DIM):
        permutation[int(bit_reversal(DIM)[i])] = order[i]
    mixing = hadamard(DIM) @ torch.eye(DIM, dtype=torch.float64)[:, permutation]
    return mixing.T @ torch.diag(values) @ mixing


@pytest.mark.parametrize("name", ["paper", "paper-per-head", "paper-softmax"])
def test_published_rotations(name: str) -> None:
    calls = [random_call(seed) for seed in range(2)]
    recipe = Recipe.named(name, **SIZES, group_size=None)
    layer = fit_layer(observed(calls, scores=True), recipe)
    keys, values = [], []
    for head in range(2):
        q = torch.cat([c.q[3 * head : 3 * head + 3].double().flatten(0, 1) for c in calls])
        o = torch.cat([c.o[3 * head : 3 * head + 3].double().flatten(0, 1) for c in calls])
        k, v = (torch.cat([getattr(c, x)[head].double() for c in calls]) for x in "kv")
        metric = q.T @ q / len(q)
        w = ((k @ metric) * k).sum(1)
        w = w / w.mean()
        keys.append(metric)
        values.append(o.T @ o / len(o) if "softmax" in name else v.T @ (w[:, None] * v) / len(v))
    if recipe.per_head:
        targets = keys, values
    else:
        targets = [sum(keys) / 2] * 2, [sum(values) / 2] * 2
    for head in range(2):
        for matrix, target in ((layer.key, targets[0]), (layer.value, targets[1])):
            rotation = matrix[head].double()
            torch.testing.assert_close(
                rotation @ rotation.T, torch.eye(DIM).double(), rtol=0, atol=1e-5
            )
            found = rotation.T @ target[head] @ rotation
            torch.testing.assert_close(found, diagonalised(target[head]), rtol=1e-4, atol=1e-4)
    assert layer.key_mean.abs().max() == 0
    assert torch.equal(layer.key[0], layer.key[1]) is not recipe.per_head


def test_balanced_transform_balances() -> None:
    """Stored energy and read-out noise are the same matrix, up to its scale (G C G = M)."""
    statistics = observed([random_call(seed) for seed in range(4)])
    layer = fit_layer(statistics, Recipe(**SIZES, ridge=1e-9, refine_keys=False))
    for head in range(2):
        key, query = layer.key[head].double(), layer.query[head].double()
        stored = key.T @ centred_keys(statistics)[head] @ key
        read = query.T @ statistics.read_queries.second_moment[head] @ query
        torch.testing.assert_close(
            stored / stored.trace(), read / read.trace(), rtol=1e-3, atol=1e-4
        )
        # Hadamard last: every stored channel has the same energy.
        torch.testing.assert_close(
            stored.diagonal() / stored.trace(),
            torch.full((DIM,), 1 / DIM).double(),
            rtol=1e-3,
            atol=0,
        )
    torch.testing.assert_close(
        layer.key_mean.double(), statistics.read_keys.mean, rtol=1e-5, atol=1e-6
    )


# -- refined keys --------------------------------------------------------------------------------

QUARTER = DIM // 4
CLASSES = (slice(0, QUARTER), slice(QUARTER, 3 * QUARTER), slice(3 * QUARTER, DIM))


def test_refined_channels_have_one_energy_and_the_order_of_what_queries_read() -> None:
    statistics = observed([random_call(seed) for seed in range(4)])
    layer = fit_layer(statistics, Recipe(**SIZES, ridge=1e-9))
    for head in range(2):
        key = layer.key[head].double()
        stored = key.T @ centred_keys(statistics)[head] @ key
        energy = torch.stack([stored.diagonal()[part].mean() for part in CLASSES])
        torch.testing.assert_close(
            energy / energy.mean(), torch.ones(3).double(), rtol=1e-3, atol=0
        )
        # Classes are apart: what one stores says nothing of another.
        blocks = torch.block_diag(*(stored[part, part] for part in CLASSES))
        torch.testing.assert_close(stored, blocks, rtol=0, atol=1e-3 * float(energy.mean()))
        inverse = reader_of(key, Recipe(refine_keys=False))
        read = (inverse.T @ statistics.read_queries.second_moment[head] @ inverse).diagonal()
        most, middle, least = (read[part] for part in CLASSES)
        assert most.min() > 1.2 * middle.max()
        assert middle.min() > 1.2 * least.max()


@pytest.mark.parametrize("bits", REFINED_BITS)
def test_refined_keys_are_read_on_the_stored_directions_whatever_the_first_digits(
    bits: int,
) -> None:
    call, levels = random_call(5), 1 << bits
    layer = fit_layer(observed([call]), Recipe(**SIZES, key_bits=bits))
    for head in range(2):
        key, query = layer.key[head].double(), layer.query[head].double()
        rows = (call.k[head] - layer.key_mean[head]).double() @ key
        first, middle, dropped = (rows[:, part] for part in CLASSES)
        digit = torch.round(first)  # any: the second digit is L times what it leaves
        codes = torch.cat([digit, middle, levels * (REFINED_SCALE[bits] * first - digit)], -1)
        again = codes @ query.T @ key
        expected = torch.cat([first, middle, torch.zeros_like(dropped)], -1)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def decaying_call(seed: int, decades: float, dim: int = 64, length: int = 256) -> AttentionCall:
    """One head whose keys and queries lie in the same directions, each weaker than the last."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -decades, dim)
    q, k, v = torch.randn(3, 1, length, dim, generator=generator)
    q, k = q * spread * 4, k * spread * 4
    logits = 0.1 * q @ k.mT + torch.full((length, length), -torch.inf).triu(1)
    return AttentionCall(q, k, v, torch.softmax(logits, -1) @ v, 0.1)


def logit_error(decades: float, recipe: Recipe) -> float:
    """Of a layer fitted to some calls, on another."""
    statistics = observed([decaying_call(seed, decades) for seed in range(6)])
    check = LayerCheck(fit_layer(statistics, recipe), statistics, recipe)
    observe_checks([check], decaying_call(9, decades), torch.Generator().manual_seed(0))
    return float(check.result().errors[0])


def test_with_split_scales_the_channels_read_least_come_second() -> None:
    statistics = observed([random_call(seed) for seed in range(4)])
    shared, split = (
        fit_layer(statistics, Recipe.named("compact", split_scales=x, **SIZES))
        for x in (False, True)
    )
    most, middle, least = (shared.key[..., part] for part in CLASSES)
    assert torch.equal(split.key, torch.cat([most, least, middle], -1))
    torch.testing.assert_close(split.exponents, shared.exponents)
    assert split.inverse_errors(Recipe.named("precise"))["key"] < 1e-4
    assert split.inverse_errors(Recipe.named("compact"))["key"] > 0.1


@pytest.mark.parametrize("name", ["balanced", "compact", "precise", "retrieval"])
def test_refined_keys_lose_less_where_some_directions_carry_most(name: str) -> None:
    recipe = Recipe.named(name, **SIZES)
    even = recipe.unrefined
    assert logit_error(1.0, recipe) < 0.6 * logit_error(1.0, even)
    # Where all directions carry the same, a quarter of them is missed.
    assert logit_error(0.0, recipe) > logit_error(0.0, even)


@pytest.mark.parametrize(("decades", "worse"), [(1.0, False), (0.0, True)])
def test_refined_keys_are_compared_with_unrefined_ones_and_kept(
    decades: float, worse: bool
) -> None:
    statistics = observed([decaying_call(seed, decades) for seed in range(6)])
    recipe = Recipe(**SIZES)
    layer, plain = (fit_layer(statistics, r) for r in (recipe, recipe.replace(refine_keys=False)))
    check = LayerCheck(layer, statistics, recipe, plain)
    observe_checks([check], decaying_call(9, decades), torch.Generator().manual_seed(0))
    key, result = layer.key.clone(), check.result()
    assert check.unrefined_errors is not None
    assert bool(result.errors[0] > check.unrefined_errors) == worse
    even = logit_error(decades, recipe.replace(refine_keys=False))  # or Hadamard's, if less
    assert even <= float(check.unrefined_errors) < 3 * even
    assert torch.equal(result.key, key)
    assert result.fallback.tolist() == [0]


# -- self-check ----------------------------------------------------------------------------------


def sharp_call(seed: int) -> AttentionCall:
    """Keys whose large directions are not those that queries read."""
    call = random_call(seed, length=120)
    spread = torch.logspace(-1, 1, DIM)
    return AttentionCall(call.q / spread, (call.k - 1) * spread + 1, call.v, call.o, call.scale)


@pytest.mark.parametrize("metric", [False, True])
def test_sabotaged_heads_fall_back(metric: bool) -> None:
    calls = [sharp_call(seed) for seed in range(4)]
    statistics = observed(calls)
    recipe = Recipe(**SIZES, metric_rounding=metric, refine_keys=False)
    good = fit_layer(statistics, recipe)
    layer = fit_layer(statistics, recipe)
    stretch = torch.logspace(-2, 2, DIM)
    layer.key[1] = layer.key[1] * stretch
    layer.query[1] = layer.query[1] / stretch
    check = LayerCheck(layer, statistics, recipe)
    observe_checks([check], sharp_call(9), torch.Generator().manual_seed(0))
    result = check.result()
    assert result.fallback.tolist() == [0, 1]
    assert torch.equal(result.key[0], good.key[0])
    torch.testing.assert_close(result.key[1], hadamard(DIM).float())
    torch.testing.assert_close(result.query[1], hadamard(DIM).float())  # orthogonal: its own A^-T
    torch.testing.assert_close(result.key[1] @ result.query[1].T, torch.eye(DIM))
    assert torch.isfinite(result.errors).all()
    assert (result.errors < 1).all()
    if metric:
        plain = hadamard(DIM) @ statistics.read_queries.second_moment[1] @ hadamard(DIM).T
        plain = plain / plain.diagonal().mean()
        torch.testing.assert_close(result.metric[1].double(), plain, rtol=1e-4, atol=1e-5)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys", "values", "queries"])
def test_dead_heads_are_named(name: str) -> None:
    call = random_call()
    rows: dict[str, Any] = {x: getattr(call, x).clone() for x in "qkvo"}
    head = slice(3, 6) if name == "queries" else slice(1, 2)
    rows[name[0]][head] = 0.7
    with pytest.raises(CalibrationError, match=f"layer 7, KV head 1: {name} do not vary"):
        fit_layer(observed([AttentionCall(**rows, scale=0.4)]), Recipe(**SIZES))


def test_text_shorter_than_the_windows() -> None:
    statistics = observed([random_call(length=8)])
    with pytest.raises(
        CalibrationError, match=r"layer 7: no key was ever read .*well over 9 tokens"
    ):
        fit_layer(statistics, Recipe(**SIZES))
    fit_layer(statistics, Recipe.named("paper", **SIZES, value_target="values"))  # needs no pairs
