"""What becomes of the scores: Prometheus metrics, and lines in the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger

from oscarkv.integrations.vllm.canary.options import CanaryOptions

logger = init_logger("vllm.oscarkv")

#: Rescored requests that a figure is the mean of: one request says little.
WINDOW = 20


@dataclass(frozen=True)
class Score:
    """One request. None: not known."""

    kl: float | None
    agreement: float | None
    drift: float | None
    seconds: float

    @classmethod
    def of_ranks(cls, ranks: list[dict[str, Any]]) -> Score:
        """Logits are one rank's, keys every rank's own."""

        def known(name: str) -> list[float]:
            return [rank[name] for rank in ranks if rank[name] is not None]

        return cls(
            kl=max(known("kl"), default=None),
            agreement=min(known("agreement"), default=None),
            drift=max(known("drift"), default=None),
            seconds=max(known("seconds")),
        )


@dataclass(frozen=True)
class _Metrics:
    requests: Counter
    seconds: Counter
    figures: dict[str, Gauge]


@lru_cache(maxsize=1)  # a name can be registered once a process
def _metrics() -> _Metrics:
    def gauge(name: str, text: str) -> Gauge:
        # Of several API servers, the one that rescored last speaks.
        return Gauge(
            f"oscarkv:canary_{name}",
            f"{text}, mean of the last {WINDOW} rescored requests.",
            ["model_name"],
            multiprocess_mode="mostrecent",
        )

    return _Metrics(
        Counter("oscarkv:canary_requests", "Requests rescored.", ["model_name"]),
        Counter("oscarkv:canary_seconds", "Time the engine spent rescoring.", ["model_name"]),
        {
            "kl": gauge("kl", "KL of the packed cache's predictions from full precision's"),
            "agreement": gauge("agreement", "Share of positions with the same likeliest token"),
            "drift": gauge("drift", "Largest factor between a layer's keys and the calibration's"),
        },
    )


class Report:
    """Keeps the last scores of one engine."""

    def __init__(self, options: CanaryOptions, model: str) -> None:
        self.model = model
        self._limits = {"kl": options.kl, "agreement": options.agreement, "drift": options.drift}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in self._limits}
        self._crossed: set[str] = set()
        _metrics().requests.labels(model)  # shows as 0 until there is one

    def add(self, score: Score) -> None:
        metrics = _metrics()
        metrics.requests.labels(self.model).inc()
        metrics.seconds.labels(self.model).inc(score.seconds)
        for name, limit in self._limits.items():
            value = getattr(score, name)
            if value is not None:
                self._last[name].append(value)
                mean = fmean(self._last[name])
                metrics.figures[name].labels(self.model).set(mean)
                self._compare(name, mean, limit)

    def _compare(self, name: str, mean: float, limit: float) -> None:
        """Say so where a figure crosses its threshold, not as long as it stays there."""
        bad = mean < limit if name == "agreement" else not mean <= limit  # NaN is bad
        if bad == (name in self._crossed):
            return
        if bad:
            self._crossed.add(name)
            logger.warning("oscarkv canary: %s", self._line(name, mean, limit))
        else:
            self._crossed.remove(name)
            logger.info("oscarkv canary: good again: %s", self._line(name, mean, limit))

    def _line(self, name: str, mean: float, limit: float) -> str:
        return (
            f"{name} {mean:.4g}, threshold {limit:g} (mean of {len(self._last[name])} rescored "
            f"requests to {self.model})"
        )
