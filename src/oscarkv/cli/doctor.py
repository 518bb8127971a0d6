"""`oscarkv doctor`: what is installed, which backend is used, and why not a faster one."""

from __future__ import annotations

import importlib
import json
import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli.bench import start_backend
from oscarkv.cli.console import results, size
from oscarkv.cli.options import BackendOption

if TYPE_CHECKING:
    import torch

    from oscarkv.kernels import AttentionBackend

FAILED = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    backend: BackendOption = "auto",
    self_test: Annotated[
        bool,
        typer.Option("--self-test/--no-self-test", help="Run the backend on a little data."),
    ] = True,
) -> None:
    """Show versions, GPUs and backends: which can run here, which is used, and why not others.

    Then try the backend: a little attention and a little packing, against the oracle. Exits
    with 1 if that goes wrong.
    """
    import torch

    from oscarkv.benchmark import machine
    from oscarkv.benchmark.run import bench_device
    from oscarkv.kernels import backend_statuses

    device = bench_device()
    chosen = start_backend(backend, device)  # before asking: this is when a failure to start shows
    report: dict[str, Any] = {
        "versions": machine.versions(),
        "driver": machine.driver() if device.type == "cuda" else None,
        "gpus": [asdict(gpu) for gpu in machine.gpus()],
        "torch_has_gpu_support": bool(torch.version.cuda or torch.version.hip),
        "backends": [asdict(status) for status in backend_statuses()],
        "chosen": chosen.name,
        "kernel_cache": _kernel_cache(),
        "self_test": _self_test(chosen, device) if self_test else None,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report, backend)
    if report["self_test"] is not None and not report["self_test"]["good"]:
        raise typer.Exit(FAILED)


def _kernel_cache() -> str | None:
    """Where the cuda backend keeps what it has compiled."""
    try:
        return str(importlib.import_module("oscarkv.kernels.cuda").cache_folder())
    except Exception:  # the backend's own line says what is wrong with it
        return None


def _self_test(backend: AttentionBackend, device: torch.device) -> dict[str, Any]:
    from oscarkv.benchmark import accuracy
    from oscarkv.benchmark.cases import Case

    shape = (8, 2, 128)
    cases = (
        Case("decode", shape, (900, 350, 40)),
        Case("write", shape, (500,) * 3),
        Case("prefill", shape, (500,), new=40),
    )
    start, checks = time.perf_counter(), []
    for case in cases:
        entry: dict[str, Any] = {"kernel": case.kind}
        try:
            found = accuracy.check(backend, case, device)
        except Exception as error:
            entry |= {"good": False, "problem": f"{type(error).__name__}: {error}"}
        else:
            entry |= {"what": found.what, "value": _finite(found.value), "limit": found.limit}
            entry["good"] = found.good
        checks.append(entry)
    return {
        "backend": backend.name,
        "good": all(entry["good"] for entry in checks),
        "checks": checks,
        "seconds": round(time.perf_counter() - start, 3),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _print(report: dict[str, Any], asked: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for name, value in _lines(report, asked):
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(value))
    results.print(table, highlight=False)


def _lines(report: dict[str, Any], asked: str) -> list[tuple[str, str]]:
    found = [(name, version or "not installed") for name, version in report["versions"].items()]
    if report["driver"]:
        found.append(("driver", report["driver"]))
    for gpu in report["gpus"]:
        facts = f"compute capability {gpu['compute_capability']}, {size(gpu['memory_bytes'])}"
        found.append((f"GPU {gpu['index']}", f"{gpu['name']}, {facts}"))
    if not report["gpus"]:
        why = "" if report["torch_has_gpu_support"] else " (this PyTorch is built without GPUs)"
        found.append(("GPU", f"none{why}"))
    for status in report["backends"]:
        state = "usable" if status["usable"] else f"not usable: {status['reason']}"
        found.append((f"backend {status['name']}", state))
    how = "auto takes" if asked == "auto" else "asked for"
    found.append((how, report["chosen"]))
    if report["kernel_cache"]:
        found.append(("compiled kernels", report["kernel_cache"]))
    return found + _test_lines(report["self_test"])


def _test_lines(test: dict[str, Any] | None) -> list[tuple[str, str]]:
    if test is None:
        return []
    found = []
    for entry in test["checks"]:
        if "problem" in entry:
            line = f"failed: {entry['problem']}"
        else:
            value = "NaN" if entry["value"] is None else f"{entry['value']:.1e}"
            verdict = "good" if entry["good"] else "wrong"
            line = f"{verdict}, {entry['what']} {value} (at most {entry['limit']:g})"
        found.append((f"self-test {entry['kernel']}", line))
    return found
