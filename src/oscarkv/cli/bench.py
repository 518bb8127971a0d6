"""`oscarkv bench`: how fast the kernels are here, and a server with them."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from oscarkv.cli import options, serving
from oscarkv.cli.console import errors, results, warn
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    import torch

    from oscarkv.kernels import AttentionBackend
    from oscarkv.recipe import Recipe

app = typer.Typer(no_args_is_help=True, help="Measure speed: of the kernels, of a server.")

FAILED = 1
#: The tables' own width: figures must not be cut off where output goes to a file.
TABLE_WIDTH = 150


@app.callback()
def _group() -> None:
    """Measure speed: of the kernels, of a server."""


app.command("serving")(serving.serving)


@app.command("kernels")
def kernels(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here.")
    ] = None,
    backend: options.BackendOption = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="The most important cases, under a minute.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Cases with this in their name.")
    ] = "",
    dense: Annotated[
        bool, typer.Option("--dense/--no-dense", help="Time BF16 attention too, and compare.")
    ] = True,
    recipe: Annotated[str, typer.Option(help="Whose packed format is timed.")] = "balanced",
    bits: Annotated[
        str, typer.Option(metavar="K,V", help="Other bits, as some layers have: 3,2 or 3,3, say.")
    ] = "",
) -> None:
    """Time write, decode and prefill of one layer, over batch, context and geometry.

    Against the best BF16 attention here (cuDNN or flash, whichever is faster) and against the
    floor: the bytes that must move, at the bandwidth that was measured. Medians over buffers larger
    than the cache. The error is that of the same kernel on less data against the fp64 oracle.

    A case is named by query heads / KV heads / head_dim and batch x context.
    """
    if json_file is not None:
        options.require_writable(json_file)
    timed = _with_bits(options.parse_recipe(recipe), bits)
    if timed.exact:
        raise OscarError(f"recipe {recipe!r} packs nothing; --recipe balanced or compact, say")

    from oscarkv.benchmark import report
    from oscarkv.benchmark.run import bench_device, bench_kernels, choose_cases

    device = bench_device()
    cases = choose_cases(device, quick=quick, only=only, recipe=timed)
    chosen = start_backend(backend, device)
    if device.type == "cpu":
        warn(
            "no GPU here: tiny cases on the CPU, to see that everything runs; the times say "
            "nothing about the kernels"
        )
    record = bench_kernels(
        cases,
        chosen,
        device,
        dense=dense,
        quick=quick,
        command=_command(json_file, backend, quick, only, dense, recipe, bits),
        progress=_print_progress,
    )
    if json_file is not None:
        record.save(json_file)
    results.print(report.headline(record), highlight=False, soft_wrap=True)
    wide = Console(width=max(results.width, TABLE_WIDTH))
    for table in report.tables(record):
        wide.print(table)
    if record.failed:
        raise typer.Exit(FAILED)


def _with_bits(recipe: Recipe, bits: str) -> Recipe:
    if not bits:
        return recipe
    parts = bits.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise OscarError(f"--bits {bits}: two numbers, of keys and of values, such as 3,2")
    keys, values = map(int, parts)
    return recipe.replace(key_bits=keys, value_bits=values, name=f"{recipe.name} {keys},{values}")


def start_backend(name: str, device: torch.device) -> AttentionBackend:
    """A backend for tensors on that device; what `auto` passes over is said in one line."""
    from oscarkv.kernels import get_backend

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = get_backend(name, device)
    for warning in caught:
        warn(str(warning.message))
    return backend


def _print_progress(done: int, total: int, what: str) -> None:
    errors.print(f"{done}/{total} {what}", highlight=False, markup=False, soft_wrap=True)


def _command(
    json_file: Path | None,
    backend: str,
    quick: bool,
    only: str,
    dense: bool,
    recipe: str,
    bits: str,
) -> str:
    """The command as it would be typed again."""
    words = ["oscarkv", "bench", "kernels"]
    words += [] if backend == "auto" else ["--backend", backend]
    words += ["--quick"] if quick else []
    words += ["--only", only] if only else []
    words += [] if dense else ["--no-dense"]
    words += [] if recipe == "balanced" else ["--recipe", recipe]
    words += ["--bits", bits] if bits else []
    words += ["--json", str(json_file)] if json_file is not None else []
    return shlex.join(words)
