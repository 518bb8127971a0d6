"""Differences between two settings on the same items: what they are, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Resamples of a bootstrap, and random signs of a permutation test.
RESAMPLES = 10_000
#: Intervals hold the middle 95 % of the resamples.
TAIL = 0.025
#: A p below this is no longer called chance.
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Gap:
    """Score of a setting less that of the reference, over the same items."""

    items: int
    reference: float
    score: float
    difference: float
    low: float  # 95 % bootstrap interval of the difference, items resampled
    high: float
    better: int  # items where the setting scores higher
    worse: int
    p: float  # exact McNemar for right and wrong; else a sign-flip test. Two-sided.

    @property
    def within_noise(self) -> bool:
        """Whether it may be chance. Resampling a handful of losses and no gain always finds a loss;
        the exact test knows better."""
        return self.low <= 0 <= self.high or self.p >= SIGNIFICANT


def gap(
    reference: Sequence[float], scores: Sequence[float], groups: Sequence[str] | None = None
) -> Gap:
    """Compare two settings item by item. Several seeds of one item come in as their mean; items
    that are not independent (questions about one text) come with a group each."""
    if len(reference) != len(scores) or not reference:
        raise ValueError(f"{len(reference)} and {len(scores)} scores are not pairs")
    a, b = np.asarray(reference, dtype=float), np.asarray(scores, dtype=float)
    change = b - a
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    # Flipping the sign of each item that differs by one is tossing coins: McNemar's own test.
    plain = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    if groups is None:
        low, high = interval(change)
        p = mcnemar(better, worse) if plain else _sign_flips(change)
    else:
        sums, sizes = _grouped(change, groups)
        low, high = interval(sums, weights=sizes)
        p = _sign_flips(sums)
    return Gap(
        items=len(a),
        reference=float(a.mean()),
        score=float(b.mean()),
        difference=float(change.mean()),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p=p,
    )


def _grouped(values: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the values in each group."""
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(index, weights=values), np.bincount(index).astype(float)


def interval(
    values: Sequence[float] | np.ndarray, seed: int = 0, weights: np.ndarray | None = None
) -> tuple[float, float]:
    """95 % bootstrap interval of a mean; the same for the same values. With weights, values are
    sums over that many items each, and the mean is that of the items."""
    x = np.asarray(values, dtype=float)
    sizes = np.ones(len(x)) if weights is None else weights
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    block = max(1, 2_000_000 // len(x))  # rows of indices held at a time
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        picks = rng.integers(0, len(x), (rows, len(x)))
        means[start : start + rows] = x[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.quantile(means, [TAIL, 1 - TAIL])
    return float(low), float(high)


def mcnemar(better: int, worse: int) -> float:
    """Chance of a split as uneven as this, or more, if each item could as well go either way."""
    tosses = better + worse
    if tosses == 0:
        return 1.0
    tail = sum(math.comb(tosses, k) for k in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**tosses))  # whole numbers, however many


def _sign_flips(change: np.ndarray, seed: int = 0) -> float:
    moved = change[change != 0]
    if not len(moved):
        return 1.0
    rng = np.random.default_rng(seed)
    seen, least = 0, abs(float(moved.sum())) - 1e-9
    block = max(1, 2_000_000 // len(moved))
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        signs = rng.integers(0, 2, (rows, len(moved))) * 2 - 1
        seen += int((np.abs(signs @ moved) >= least).sum())
    return (seen + 1) / (RESAMPLES + 1)


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share; unlike a bootstrap it has a width at 0 and at 1."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    share = right / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
