"""Paired differences against figures worked out by hand."""

import numpy as np
import pytest

from oscarkv.evaluation.paired import gap, interval, mcnemar, wilson


def test_mcnemar_is_the_binomial_test_of_the_pairs_that_differ() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 * 0.5**5)
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(300, 1000) < 1e-50  # no overflow


def test_a_gap_counts_pairs_and_signs() -> None:
    reference = [1.0] * 80 + [0.0] * 20
    scores = [1.0] * 70 + [0.0] * 10 + [1.0] * 4 + [0.0] * 16
    found = gap(reference, scores)
    assert (found.reference, found.score) == (0.8, 0.74)
    assert found.difference == pytest.approx(-0.06)
    assert (found.better, found.worse) == (4, 10)
    assert found.p == pytest.approx(mcnemar(4, 10))
    assert found.low < -0.06 < found.high
    assert found.within_noise
    # The normal approximation of the same interval.
    half = 1.96 * np.std(np.array(scores) - np.array(reference)) / 10
    assert found.high - found.low == pytest.approx(2 * half, rel=0.06)


def test_a_large_gap_is_no_noise() -> None:
    found = gap([1.0] * 100, [1.0] * 60 + [0.0] * 40)
    assert not found.within_noise
    assert found.p < 1e-9


def test_a_few_losses_and_no_gain_may_be_chance() -> None:
    found = gap([1.0] * 100, [1.0] * 96 + [0.0] * 4)
    assert found.high < 0
    assert found.p == 0.125
    assert found.within_noise
    assert not gap([1.0] * 100, [1.0] * 92 + [0.0] * 8).within_noise


def test_means_over_seeds_are_tested_by_flipping_signs() -> None:
    rng = np.random.default_rng(0)
    reference = rng.integers(0, 6, 60) / 5
    assert gap(list(reference), list(reference)).p == 1.0
    worse = np.clip(reference - 0.2, 0, 1)
    assert gap(list(reference), list(worse)).p < 0.001


def test_items_of_one_group_do_not_count_as_many() -> None:
    """Ten questions about each of ten texts, all ten lost in three of them."""
    reference = [1.0] * 100
    scores = [0.0 if i < 30 else 1.0 for i in range(100)]
    alone = gap(reference, scores)
    grouped = gap(reference, scores, groups=[str(i // 10) for i in range(100)])
    assert grouped.difference == alone.difference == pytest.approx(-0.3)
    assert grouped.high - grouped.low > 2.5 * (alone.high - alone.low)
    assert grouped.p > 0.2
    assert alone.p < 1e-6


def test_intervals_are_the_same_each_time_and_need_pairs() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert interval(values) == interval(values)
    with pytest.raises(ValueError, match="not pairs"):
        gap([1.0], [1.0, 0.0])


def test_wilson_has_a_width_at_the_ends() -> None:
    low, high = wilson(100, 100)
    assert high == 1.0
    assert low == pytest.approx(0.963, abs=0.001)
    assert wilson(0, 0) == (0.0, 1.0)
