"""docs/format.md, line by line, for one row in NumPy: an implementation that shares no code.

Every floating-point step is one operation on `np.float32`; every sum is a Python integer.
"""

from __future__ import annotations

import numpy as np

F = np.float32
STARTS = (0.85, 1.0, 1.2)
OPTIMAL = {4: 0.9957, 8: 0.5860, 16: 0.3352}
GRID = np.array([F(2 ** (n % 16 / 16)) * F(2 ** (n // 16)) for n in range(256)], F)
BOUNDS = np.array([F(2 ** ((n % 16 + 0.5) / 16)) * F(2 ** (n // 16)) for n in range(255)], F)


def channel_of(word: int, half: int, slot: int, words: int) -> int:
    return (2 * slot + half) * words + word


def pack(codes: list[int], bits: int) -> bytes:
    """A row's bytes, bit by bit."""
    planes = [(2, 0), (1, 2)] if bits == 3 else [(bits, 0)]
    packed = b""
    for width, shift in planes:
        words = -(-len(codes) * width // 32)
        for word in range(words):
            value = 0
            for half in range(2):
                for slot in range(16 // width):
                    channel = channel_of(word, half, slot, words)
                    if channel < len(codes):
                        field = codes[channel] >> shift & ((1 << width) - 1)
                        value |= field << (16 * half + width * slot)
            packed += value.to_bytes(4, "little")
    return packed


def store(s: F, lo: F, fmt: str, levels: int, base: F) -> tuple[bytes, F, F]:
    if fmt == "fp16":
        half_s = np.float16(min(max(s, F(2.0**-14)), F(65504)))
        half_lo = np.float16(min(max(lo, F(-65504)), F(65504)))
        return half_s.tobytes() + half_lo.tobytes(), F(half_s), F(half_lo)
    step = F((levels - 1) / 96)
    if fmt == "log8":
        s = max(s, abs(lo) / F(127 * (levels - 1) / 96))
    n = int((s / base >= BOUNDS).sum())
    s = GRID[n] * base
    if fmt == "log8-symmetric":
        return bytes([n]), s, s * F(-(levels - 1) / 2)
    z = min(max(np.rint(lo / s / step), F(-127)), F(127))
    return bytes([n, int(z) % 256]), s, s * (z * step)


def load(stored: bytes, fmt: str, levels: int, base: F) -> tuple[F, F]:
    """A row's s and lo as a reader sees them."""
    if fmt == "fp16":
        s, lo = np.frombuffer(stored, np.float16)
        return F(s), F(lo)
    s = GRID[stored[0]] * base
    if fmt == "log8-symmetric":
        return s, s * F(-(levels - 1) / 2)
    return s, s * (F(np.int8(stored[1] - 256 * (stored[1] > 127))) * F((levels - 1) / 96))


def _power(x: F, power: float) -> F:
    root = np.sqrt(x)
    quarter = np.sqrt(root)
    return {0.0: F(1), 0.25: quarter, 0.5: root, 0.75: root * quarter, 1.0: x}[power]


def _codes(x, s: F, lo: F, levels: int, symmetric: bool) -> list[int]:
    """How many of the thresholds between the levels each number reaches."""
    if symmetric:
        thresholds = [s * F(k - levels / 2) for k in range(1, levels)]
    else:
        thresholds = [s * F(k - 0.5) + lo for k in range(1, levels)]
    return [sum(bool(t <= F(i)) for t in thresholds) for i in x]


def _round(X: list[int], S: F, LO: F, levels: int, symmetric: bool):
    """One round of the fit: the next S, LO, and the covariance and energy behind them."""
    n, top, sum_x = len(X), levels - 1, sum(X)
    c = _codes(X, S, LO, levels, symmetric)
    sum_c, sum_cc = sum(c), sum(i * i for i in c)
    sum_cx = sum(i * x for i, x in zip(c, X, strict=True))
    if symmetric:
        covariance = F(n * (2 * sum_cx - top * sum_x))
        energy = F(n * (4 * sum_cc - 4 * top * sum_c + n * top * top))
        return F(2) * covariance / energy, LO, covariance, energy
    covariance = F(n * sum_cx - sum_c * sum_x)
    energy = F(n * sum_cc - sum_c * sum_c)
    S = covariance / max(energy, F(1))
    return S, (F(sum_x) - S * F(sum_c)) / F(n), covariance, energy


def _least_squares(x: np.ndarray, bits: int, fmt: str, gain: float, base: F):
    levels, n, symmetric = 1 << bits, len(x), fmt == "log8-symmetric"
    lowest, highest = x.min(), x.max()
    middle = F(0) if symmetric else F(0.5) * lowest + F(0.5) * highest
    half = max(highest - middle, middle - lowest, F(2.0**-100))
    unit = F(2.0 ** (int(np.frexp(half)[1]) - 1 - 10))
    X = [int(i) for i in np.rint((x - middle) / unit)]
    sum_x = sum(X)
    spread = F(n * sum(i * i for i in X) - (0 if symmetric else sum_x * sum_x))
    center = F(0) if symmetric else F(sum_x) / F(n)
    deviation = np.sqrt(spread) / F(n)
    scales = [deviation * (F(factor) * F(OPTIMAL[levels])) for factor in STARTS]
    fits = [_round(X, S, center - S * F((levels - 1) / 2), levels, symmetric) for S in scales]
    explained = [cov * cov / max(energy, F(1)) for _, _, cov, energy in fits]
    S, LO, _, _ = fits[explained.index(max(explained))]
    for _ in range(3):
        S, LO, covariance, energy = _round(X, S, LO, levels, symmetric)
    ratio = spread * energy / max(covariance * covariance, F(2.0**-126))
    g = _power(min(max(ratio, F(0.8)), F(1.5)), gain)
    s = S * g * unit
    if symmetric:
        lo = s * F(-(levels - 1) / 2)
    else:
        lo = ((LO - center) * g + center) * unit + middle
    center = center * unit + middle
    stored, s, lo = store(s, lo, fmt, levels, base)
    s = s / g
    lo = s * F(-(levels - 1) / 2) if symmetric else (lo - center) / g + center
    return s, lo, stored


def _two_digits(x, s: F, lo: F, levels: int, symmetric: bool) -> tuple[list[int], list[int]]:
    first = _codes(x, s, lo, levels, symmetric)
    left = [(i - (s * F(c) + lo)) * F(levels) for i, c in zip(x, first, strict=True)]
    return first, _codes(left, s, lo, levels, symmetric)


def _refined(row: np.ndarray, bits: int, fmt: str, gain: float, base: F) -> tuple[list[int], bytes]:
    quarter, levels, symmetric = len(row) // 4, 1 << bits, fmt == "log8-symmetric"
    s, lo, stored = _least_squares(row[: 3 * quarter], bits, fmt, gain, base)
    middle = _codes(row[quarter : 3 * quarter], s, lo, levels, symmetric)
    s, lo = load(stored, fmt, levels, base)
    scaled = row[:quarter] * F({2: 0.75, 3: 0.6875}[bits])
    first, second = _two_digits(scaled, s, lo, levels, symmetric)
    return first + middle + second, stored


def _split(row: np.ndarray, bits: int, fmt: str, gain: float, base: F) -> tuple[list[int], bytes]:
    quarter, levels = len(row) // 4, 1 << bits
    twice, once = row[:quarter], row[2 * quarter :]
    largest = np.abs(twice).max() * F({2: 0.53125, 3: 0.25390625}[bits])
    wide, s, lo = store(largest, largest, fmt, levels, base)
    first, second = _two_digits(twice, s, lo, levels, True)
    s, lo, narrow = _least_squares(once, bits, fmt, gain, base)
    return first + second + _codes(once, s, lo, levels, True), wide + narrow


def _minmax(x: np.ndarray, threshold: F | None, bits: int, fmt: str, base: F):
    clipped = x if threshold is None else np.clip(x, -threshold, threshold)
    lo = clipped.min()
    s = max(clipped.max() - lo, F(1e-8)) / F((1 << bits) - 1)
    stored, s, lo = store(s, lo, fmt, 1 << bits, base)
    return s, lo, stored


def encode(row, bits, groups, fmt, fit, clip, gain, refined, base) -> tuple[list[int], bytes]:
    """A row's codes in channel order and its stored parameters."""
    row, base = np.asarray(row, F), F(base)
    if refined and groups == 2:
        return _split(row, bits, fmt, gain, base)
    if refined:
        return _refined(row, bits, fmt, gain, base)
    threshold = None
    if clip:
        threshold = np.sort(np.abs(row))[min(int(clip * len(row)), len(row) - 1)]
    codes: list[int] = []
    parameters = b""
    for x in np.split(row, groups):
        if fit == "minmax":
            s, lo, stored = _minmax(x, threshold, bits, fmt, base)
        else:
            s, lo, stored = _least_squares(x, bits, fmt, gain, base)
        codes += _codes(x, s, lo, 1 << bits, fmt == "log8-symmetric")
        parameters += stored
    return codes, parameters
