"""Timing calls on a device.

Calls come as a list, one for each of several independent buffer sets, as a model's layers are:
they are run in turn, so that what one reads has left the cache by the time it is its turn again.
All of them go into one CUDA graph, which is replayed between two events; a graph holds calls
enough that starting it does not count, and Python does not count at all.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

#: Between two uses of a byte, this many times the cache's size is touched.
CACHE_FACTOR = 3
#: More independent buffer sets are never made, and more calls never captured in one graph.
MOST_SETS = 256
#: A replay should take this long, so that what a launch costs does not count.
REPLAY_SECONDS = 2e-3
#: Clocks need a moment to come up.
WARM_UP_SECONDS = 30e-3
REPEATS = 20
MOST_REPEATS = 100
#: Replays go on this long at least, and (where that means fewer than REPEATS of them) at most.
LEAST_SECONDS = 0.25
MOST_SECONDS = 8.0


@dataclass(frozen=True)
class Timing:
    """Of one call, in seconds."""

    median: float
    low: float  # a tenth of the replays were faster
    high: float  # a tenth were slower
    repeats: int
    calls: int  # in each repeat
    method: str


def cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sets_needed(touched: int, device: torch.device) -> int:
    """How many independent buffer sets keep calls that touch so many bytes out of the cache."""
    needed = math.ceil(CACHE_FACTOR * cache_bytes(device) / max(1, touched))
    return min(max(needed, 1), MOST_SETS)


def measure(calls: Sequence[Call], device: torch.device, *, graph: bool = True) -> Timing:
    """The time of one call. `graph=False` for calls that wait for the device."""
    if device.type != "cuda":
        return _measure_on_cpu(calls)
    with torch.cuda.device(device):
        return _measure_on_gpu(calls, graph)


def _measure_on_gpu(calls: Sequence[Call], graph: bool) -> Timing:
    def run_all() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()  # as capturing asks for
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_all()  # compiles, tunes, allocates
        torch.cuda.synchronize()
        estimate = _elapsed(run_all)
    torch.cuda.current_stream().wait_stream(side)

    method = "events around the calls, launches included"
    replay, rounds = run_all, 1
    if graph:
        rounds = math.ceil(REPLAY_SECONDS / estimate)
        rounds = max(1, min(rounds, MOST_SETS // len(calls)))
        captured = _capture(run_all, rounds)
        if isinstance(captured, str):
            method, rounds = f"{method} (graph capture failed: {captured})", 1
        else:
            method, replay = "CUDA graph", captured.replay
    estimate = _elapsed(replay)
    for _ in range(_clamp(WARM_UP_SECONDS / estimate, 3, 50) if estimate < 0.5 else 1):
        replay()
    repeats = _clamp(LEAST_SECONDS / estimate, REPEATS, MOST_REPEATS)
    repeats = min(repeats, _clamp(MOST_SECONDS / estimate, 3, MOST_REPEATS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    # An event between every two replays: the device never idles, and each is timed.
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    count = rounds * len(calls)
    times = [a.elapsed_time(b) / 1e3 / count for a, b in itertools.pairwise(events)]
    return _summary(times, count, method)


def _capture(run_all: Callable[[], None], rounds: int) -> torch.cuda.CUDAGraph | str:
    """The calls as a graph, or why they cannot be one."""
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            for _ in range(rounds):
                run_all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it was, calls can still be timed one by one
        torch.cuda.synchronize()
        return " ".join(str(error).split())[:200] or type(error).__name__
    return captured


def _elapsed(run: Callable[[], object]) -> float:
    """Seconds of one run, host and device together; never zero."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return max(time.perf_counter() - start, 1e-7)


def _measure_on_cpu(calls: Sequence[Call]) -> Timing:
    for call in calls:
        call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < REPEATS and (len(times) < 3 or time.perf_counter() - began < LEAST_SECONDS):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
    return _summary(times, len(calls), "wall clock")


def host_seconds(call: Call, device: torch.device, repeats: int = 5) -> float:
    """The median time of a call as its caller sees it, the device's work included."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _clamp(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def _summary(times: list[float], calls: int, method: str) -> Timing:
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Timing(
        statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(times), calls, method
    )
