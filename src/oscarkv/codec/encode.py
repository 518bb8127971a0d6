"""From a transformed row (fp32) to codes and stored parameters, in one exact way.

Least squares would depend on the order in which a backend adds, so the row is first rounded to
integers X of at most 2^11 in magnitude. All sums of the fit are then sums of integers below 2^31,
equal in any order, and every other operation is a single IEEE fp32 operation per row. The codes
are finally taken from the fp32 row itself with the parameters as stored. A code, there as in the
fit, is the number of thresholds that a number reaches: no division per number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from oscarkv.codec import parameters
from oscarkv.codec.rounding import metric_round
from oscarkv.recipe import Recipe

#: Starting scales of the fit, in units of the row's standard deviation, by number of levels:
#: the best uniform quantiser of a normal row, and 15 % and 20 % to either side of it.
OPTIMAL_SCALE = {4: 0.9957, 8: 0.5860, 16: 0.3352}
START_FACTORS = (0.85, 1.0, 1.2)
#: Every start gets one round of the fit, the best of them this many more.
REFINE_ROUNDS = 3
GAIN_LIMITS = (0.8, 1.5)
#: Of rows with two digits, by bits of a digit: their many levels are best spread over less of a
#: channel than those of one digit are.
REFINED_SCALE = {2: 0.75, 3: 0.6875}
#: Scale of two-digit channels that have their own, of their largest number, by bits of a digit: the
#: last level (of 2 bits: 1.875 s) then lies on it. Cut off or rounded away from there it would cost
#: far more.
SPLIT_SCALE = {2: 17 / 32, 3: 65 / 256}
_UNIT = 2.0**-10
_TINY = torch.finfo(torch.float32).tiny
_SMALLEST_RANGE = 2.0**-100  # far below anything stored, far above where fp32 loses precision


@dataclass(frozen=True)
class RowCodec:
    """How the rows of one side (keys or values) are encoded."""

    bits: int
    groups: int
    parameter_format: str
    fit: str
    clip: float
    gain: float
    #: The first quarter of the channels has a second digit, in the place of the last quarter; with
    #: two groups in that of the second, and a scale of its own.
    refined: bool = False

    @classmethod
    def for_keys(cls, recipe: Recipe, head_dim: int) -> RowCodec:
        codec = cls._of(recipe, head_dim, recipe.key_bits, recipe.key_clip, recipe.key_gain)
        return replace(codec, refined=recipe.refined)

    @classmethod
    def for_values(cls, recipe: Recipe, head_dim: int) -> RowCodec:
        return cls._of(recipe, head_dim, recipe.value_bits, recipe.value_clip, recipe.value_gain)

    @classmethod
    def _of(cls, recipe: Recipe, head_dim: int, bits: int, clip: float, gain: float) -> RowCodec:
        groups, stored = recipe.groups(head_dim), recipe.parameter_format(head_dim)
        return cls(bits, groups, stored, recipe.fit, clip, gain)

    @property
    def levels(self) -> int:
        return 1 << self.bits

    @property
    def symmetric(self) -> bool:
        return self.parameter_format == "log8-symmetric"

    def encode(
        self, rows: Tensor, base: Tensor, metric: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """fp32 rows [..., d], base = 2^e0 broadcasting against [...] -> codes, parameters (uint8).

        Codes are [..., d] in channel order, parameters [..., G pb] as stored. With a metric
        [H, d, d], rows are [H, n, d] and codes are improved by coordinate descent under it.
        """
        if self.refined and self.groups == 2:
            return self._encode_split(rows, base)
        whole, quarter = rows, rows.shape[-1] // 4
        if self.refined:
            rows = rows[..., : 3 * quarter]  # the rest is not stored
        stored, s, lo = self._fit(rows, base, lambda ratio: _quarter_power(ratio, self.gain))
        codes = self._codes(rows, s, lo)
        if metric is not None:
            codes = metric_round(rows, codes, s, lo, metric, self.levels)
        if self.refined:
            scale = REFINED_SCALE[self.bits]
            digits = self._two_digits(whole[..., :quarter] * scale, stored, base)
            codes = torch.cat([digits[0], codes[..., quarter:], digits[1]], -1)
        return codes, stored

    def _encode_split(self, rows: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        plain, quarter = replace(self, groups=1, refined=False), rows.shape[-1] // 4
        twice, once = rows[..., :quarter], rows[..., 2 * quarter :]  # between them: not stored
        s = (twice.abs().amax(-1) * SPLIT_SCALE[self.bits]).unsqueeze(-1)
        base_of = base.unsqueeze(-1)
        wide, _, _ = parameters.store(s, s, self.parameter_format, self.levels, base_of)
        codes, narrow = plain.encode(once, base)
        digits = plain._two_digits(twice, wide, base)
        return torch.cat([*digits, codes], -1), torch.cat([wide, narrow], -1)

    def _two_digits(self, rows: Tensor, stored: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Codes on the grid of a reader, and those of L times what they leave."""
        s, lo = parameters.load(stored, self.parameter_format, self.levels, base.unsqueeze(-1))
        first = self._codes(rows, s, lo)
        return first, self._codes((rows - (s * first.float() + lo)) * self.levels, s, lo)

    def encode_with(
        self, values: RowCodec, key_rows: Tensor, value_rows: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode keys (with this codec) and values (with theirs) together: [2, ...] results.

        The same numbers as two calls of `encode`, in half the operations; only for codecs that
        differ in nothing but the gain (`shares_grid`). base is [2, ...].
        """

        def gains(ratio: Tensor) -> Tensor:
            return torch.stack(
                [_quarter_power(ratio[0], self.gain), _quarter_power(ratio[1], values.gain)]
            )

        rows = torch.stack([key_rows, value_rows])
        stored, s, lo = self._fit(rows, base, gains)
        return self._codes(rows, s, lo), stored

    def shares_grid(self, other: RowCodec) -> bool:
        return replace(self, gain=0.0) == replace(other, gain=0.0) and self.clip == other.clip

    def _fit(
        self, rows: Tensor, base: Tensor, gain_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stored parameters, and the grid s, lo [..., G] that the codes are taken on."""
        x = rows.unflatten(-1, (self.groups, -1))
        base = base.unsqueeze(-1)
        if self.fit == "minmax":
            s, lo = self._fit_minmax(rows, x)
            return parameters.store(s, lo, self.parameter_format, self.levels, base)
        s, lo, gain, center = self._fit_least_squares(x, gain_of)
        stored, s, lo = parameters.store(s, lo, self.parameter_format, self.levels, base)
        # The codes are those of the grid before the gain stretched it. (Dividing by a gain
        # of one changes nothing: the offset is then within one rounding of the stored one.)
        s = s / gain
        lo = s * (-(self.levels - 1) / 2) if self.symmetric else (lo - center) / gain + center
        return stored, s, lo

    def _codes(self, rows: Tensor, s: Tensor, lo: Tensor) -> Tensor:
        x = rows.unflatten(-1, (self.groups, -1))
        reaches = self._thresholds(s, lo)[..., None] <= x[..., None, :]
        return reaches.sum(-2, dtype=torch.uint8).flatten(-2)

    def _thresholds(self, s: Tensor, lo: Tensor) -> Tensor:
        """The numbers [..., L - 1] halfway between neighbouring levels of the grids s, lo [...]."""
        thresholds = s[..., None] * _offsets(self.levels, self.symmetric, str(s.device))
        return thresholds if self.symmetric else thresholds + lo[..., None]

    def decode(self, codes: Tensor, stored: Tensor, base: Tensor) -> Tensor:
        """Codes uint8 [..., d] and parameters [..., G pb] -> fp32 rows [..., d]."""
        s, lo = parameters.load(stored, self.parameter_format, self.levels, base.unsqueeze(-1))
        grouped = codes.unflatten(-1, (self.groups, -1)).float()
        return (s[..., None] * grouped + lo[..., None]).flatten(-2)

    # -- fits --------------------------------------------------------------------------------

    def _fit_minmax(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Range of the row, clipped at a quantile of the whole row's magnitudes."""
        if self.clip:
            dim = rows.shape[-1]
            index = min(int(self.clip * dim), dim - 1)
            threshold = rows.abs().sort(-1).values[..., index, None, None]
            x = x.clamp(-threshold, threshold)
        lo, hi = x.amin(-1), x.amax(-1)
        return parameters.divide((hi - lo).clamp_min(1e-8), self.levels - 1), lo

    def _fit_least_squares(
        self, x: Tensor, gain_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Best s, lo over several starts, times the gain; also the gain and the row's center."""
        shape, n = x.shape[:-1], x.shape[-1]
        rows = x.reshape(-1, n)
        lowest, highest = torch.aminmax(rows, dim=-1)
        if self.symmetric:
            middle = torch.zeros_like(lowest)
            half = torch.maximum(highest, -lowest)
        else:
            middle = 0.5 * lowest + 0.5 * highest
            half = torch.maximum(highest - middle, middle - lowest)
        unit = parameters.power_below(half.clamp_min(_SMALLEST_RANGE)) * _UNIT  # half < 2^11 unit
        X = torch.round((rows - middle[:, None]) / unit[:, None])  # exact: unit is a power of two

        exact = X.double()  # sums of integers: the same in any order
        sum_x = exact.sum(-1)
        spread = (exact * exact).sum(-1) * n  # n^2 times the variance
        if not self.symmetric:
            spread = spread - sum_x * sum_x
        spread = spread.float()
        center = middle if self.symmetric else parameters.divide(sum_x.float(), n)
        deviation = parameters.divide(_sqrt(spread), n)

        S, LO, covariance, energy = self._alternate(X, sum_x, deviation, center)
        ratio = (spread * energy) / (covariance * covariance).clamp_min(_TINY)
        gain = gain_of(ratio.clamp(*GAIN_LIMITS).view(shape)).flatten()
        s = (S * gain) * unit
        if self.symmetric:
            lo = s * (-(self.levels - 1) / 2)
        else:
            lo = ((LO - center) * gain + center) * unit + middle
        center = center * unit + middle
        return s.view(shape), lo.view(shape), gain.view(shape), center.view(shape)

    def _alternate(
        self, X: Tensor, sum_x: Tensor, deviation: Tensor, center: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Alternate rounding and fitting: once from every start, then on from the best of them.

        X holds rows [R, n] of integers. Returns S, LO [R] and the integers behind them,
        cov = n sum(cX) - sum(c) sum(X) and den = n sum(c^2) - sum(c)^2 (symmetric: n sum(zX) and
        n sum(z^2), z = 2c - L + 1). A constant row has cov = den = 0 and gets S = 0.
        """
        n, top = X.shape[-1], self.levels - 1
        weights = _weights(self.levels, self.symmetric, n, str(X.device))
        features = torch.stack([torch.ones_like(X), X], -1)
        X, sum_x = X[:, None], sum_x[:, None]
        total = sum_x.float()

        def improve(S: Tensor, LO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            # From grids S, LO [R, m] to the best grids for their codes, with cov and den. A code
            # c = how many thresholds k = 1 .. top the integer X reaches. With M the 0/1 matrix of
            # "reaches", sum(c) = sum M, sum(c^2) = sum (2k - 1) M, and sum(cX) = sum M X:
            # integers below 2^24, exact in fp32 in any order.
            reaches = self._thresholds(S, LO).flatten(-2)[..., None] <= X
            sums = torch.bmm(reaches.float(), features).view(*S.shape, 2 * top)
            sum_c, n_cc, n_cx = (sums.double() @ weights).unbind(-1)
            if self.symmetric:
                covariance = (n_cx - n * top * sum_x).float()
                energy = (n_cc + (n * top) ** 2).float()
                return 2 * covariance / energy, LO, covariance, energy
            covariance = (n_cx - sum_c * sum_x).float()
            energy = (n_cc - sum_c * sum_c).float()
            S = covariance / energy.clamp_min(1.0)
            return S, parameters.divide(total - S * sum_c.float(), n), covariance, energy

        S = deviation[:, None] * _starts(self.levels, str(X.device))  # [R, starts]
        S, LO, covariance, energy = improve(S, center[:, None] - S * (top / 2))
        explained = (covariance * covariance) / energy.clamp_min(1.0)
        best = explained.argmax(-1, keepdim=True)  # the first of equals
        S, LO = S.gather(-1, best), LO.gather(-1, best)
        for _ in range(REFINE_ROUNDS):
            S, LO, covariance, energy = improve(S, LO)
        return S[:, 0], LO[:, 0], covariance[:, 0], energy[:, 0]


@lru_cache(maxsize=32)
def _starts(levels: int, device: str) -> Tensor:
    """First scales, in standard deviations."""
    factors = torch.tensor(START_FACTORS, dtype=torch.float32, device=device)
    return factors * OPTIMAL_SCALE[levels]


@lru_cache(maxsize=32)
def _offsets(levels: int, symmetric: bool, device: str) -> Tensor:
    """Thresholds, in units of the scale: k - 1/2 from lo on, or k - L/2 from 0 (symmetric)."""
    k = torch.arange(1, levels, dtype=torch.float32, device=device)
    return k - levels / 2 if symmetric else k - 0.5


@lru_cache(maxsize=32)
def _weights(levels: int, symmetric: bool, n: int, device: str) -> Tensor:
    """[2 (L - 1), 3]: from (sum M, sum M X) of each k to sum(c), den and cov.

    Of den and cov, what is linear in M: n sum(c^2) and n sum(cX). Symmetric, with z = 2c - L + 1:
    n sum(z^2 - (L - 1)^2) and 2 n sum(cX).
    """
    k = torch.arange(1, levels, dtype=torch.float64, device=device)
    one, zero = torch.ones_like(k), torch.zeros_like(k)
    of_count = torch.stack([one, n * (4 * (2 * k - levels) if symmetric else 2 * k - 1), zero], -1)
    of_sum = torch.stack([zero, zero, n * (2 * one if symmetric else one)], -1)
    return torch.stack([of_count, of_sum], 1).flatten(0, 1)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: torch's own is one unit off here and there on CPUs."""
    return torch.sqrt(x.double()).float()


def _quarter_power(x: Tensor, power: float) -> Tensor:
    """x^power for multiples of 1/4, by square roots and products only."""
    if power == 0:
        return torch.ones_like(x)
    if power == 1:
        return x
    root = _sqrt(x)
    if power == 0.5:
        return root
    quarter = _sqrt(root)
    return quarter if power == 0.25 else root * quarter
