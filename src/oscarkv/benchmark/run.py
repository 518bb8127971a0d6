"""Runs the cases, one after the other, whatever becomes of any of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from oscarkv.benchmark import accuracy, machine
from oscarkv.benchmark.baseline import measure_bandwidth, release, time_baselines
from oscarkv.benchmark.cases import RECIPE, Case, cpu_cases, gpu_cases
from oscarkv.benchmark.report import CaseResult, Record
from oscarkv.benchmark.synthetic import make_step
from oscarkv.benchmark.timing import Call, Timing, host_seconds, measure, sets_needed
from oscarkv.errors import OscarError
from oscarkv.kernels import AttentionBackend, backend_statuses
from oscarkv.recipe import Recipe

Progress = Callable[[int, int, str], None]


def bench_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)  # the cases for a CPU are tiny: threads only wait for each other
    return torch.device("cpu")


def choose_cases(
    device: torch.device, *, quick: bool = False, only: str = "", recipe: Recipe = RECIPE
) -> list[Case]:
    """The cases for a device; `only` is a part of their names."""
    listed = cpu_cases() if device.type == "cpu" else gpu_cases()
    cases = [replace(case, recipe=recipe) for case in listed]
    if quick and device.type != "cpu":
        cases = [case for case in cases if case.quick]
    chosen = [case for case in cases if only in case.name]
    if not chosen:
        names = "; ".join(case.name for case in cases)
        raise OscarError(f"no case has {only!r} in its name; there are: {names}")
    return chosen


def bench_kernels(
    cases: Sequence[Case],
    backend: AttentionBackend,
    device: torch.device,
    *,
    dense: bool = True,
    quick: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Record:
    """Times every case. `dense=False` leaves BF16 attention out; the ratios are then missing."""
    say = progress or (lambda done, total, what: None)
    on_gpu = device.type == "cuda"
    chosen = machine.gpu(device.index or 0) if on_gpu else None
    say(0, len(cases), "memory bandwidth")
    record = Record(
        backend=backend.name,
        device=chosen.name if chosen else machine.processor(),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=quick,
        machine={
            "versions": machine.versions(),
            "driver": machine.driver() if on_gpu else None,
            "gpu": asdict(chosen) if chosen else None,
            "backends": [asdict(status) for status in backend_statuses()],
        },
        bandwidth=measure_bandwidth(device),
    )
    release(device)
    for index, case in enumerate(cases):
        say(index + 1, len(cases), case.name)
        record.results.append(run_case(case, backend, device, dense=dense))
    return record


def run_case(
    case: Case, backend: AttentionBackend, device: torch.device, *, dense: bool = True
) -> CaseResult:
    result = CaseResult(case)
    try:
        result.accuracy = accuracy.check(backend, case, device)
        result.layers = sets_needed(case.touched_bytes, device)
        result.timing, result.plan_seconds = _time_kernel(case, backend, device, result.layers)
    except torch.OutOfMemoryError:
        result.status, result.reason = "skipped", "out of memory"
    except Exception as error:  # the other cases can still be measured
        text = " ".join(str(error).split())[:300]
        result.status, result.reason = "failed", f"{type(error).__name__}: {text}"
    release(device)
    if dense and result.status == "measured":
        result.baselines = time_baselines(case, device)
        release(device)
    return result


def _time_kernel(
    case: Case, backend: AttentionBackend, device: torch.device, layers: int
) -> tuple[Timing, float]:
    step = make_step(case, device, layers)
    plan_seconds = host_seconds(lambda: step.plan(backend), device)
    calls: list[Call] = [partial(step.run, backend, index) for index in range(layers)]
    # The oracle waits for the device, so it cannot be captured.
    return measure(calls, device, graph=backend.name != "torch"), plan_seconds
