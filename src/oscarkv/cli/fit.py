"""What `oscarkv vllm check` and `oscarkv sglang check` share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli.console import errors, results
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.integrations.serving.fit import Engine, Fit, Memory

DOES_NOT_FIT = 1
_MARKS = {"good": "[green]good[/green]", "warning": "[yellow]note[/yellow]",
          "problem": "[red]problem[/red]"}  # fmt: skip

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory or a hub id (org/name).")
]
ArtifactOption = Annotated[Path, typer.Option(metavar="FILE", help="The model's artifact.")]
MemoryOption = Annotated[
    float | None, typer.Option(metavar="GIB", help="Memory for the KV cache, of each GPU.")
]
GpuMemoryOption = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="A GPU's memory.", show_default="that of the GPU here"),
]
LongestOption = Annotated[
    int | None, typer.Option(min=1, help="Longest request.", show_default="the model's context")
]
RanksOption = Annotated[int, typer.Option(min=1, help="GPUs a model.")]
SinkOption = Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")]
RecentOption = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def report(found: Fit, as_json: bool, command: str) -> None:
    """Print the answer, and the command to start a server with; exit with 1 if it would not."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    if not found.good:
        errors.print("a server would refuse to start", highlight=False)
        raise typer.Exit(DOES_NOT_FIT)
    if not as_json:
        results.print(command, markup=False, highlight=False, soft_wrap=True)


def words_of(given: dict[str, object]) -> list[str]:
    """A server's options, as words; None: it was not given."""
    pairs = [(name, str(value)) for name, value in given.items() if value is not None]
    return [word for pair in pairs for word in pair]


def memory_for(
    engine: Engine,
    model: str,
    memory: float | None,
    share: float | None,
    gpu: float | None,
    ranks: int,
    option: str,
    dtype: str,
) -> Memory | None:
    """Bytes for the cache of each GPU, as the options say; `option` is the one for the share."""
    from oscarkv.integrations.serving.fit import GIB, Memory, memory_of

    for name, value in (("--memory", memory), ("--gpu-memory", gpu)):
        if value is not None and not 0 < value < math.inf:
            raise OscarError(f"{name} {value:g}: give a number of GiB above 0")
    if memory is not None:
        if share is not None or gpu is not None:
            raise OscarError(f"give either --memory or {option}, not both")
        return Memory(int(memory * GIB), "as given")
    if share is None:
        if gpu is not None:
            raise OscarError(f"--gpu-memory goes with {option}")
        return None
    if not 0 < share <= 1:
        raise OscarError(f"{option} {share:g}: give a share above 0, at most 1")
    if gpu is not None:
        return memory_of(engine, model, share, int(gpu * GIB), ranks, dtype)
    import torch

    if not torch.cuda.is_available():
        raise OscarError("there is no GPU here whose memory could be asked for; give --gpu-memory")
    total = torch.cuda.get_device_properties(0).total_memory
    return memory_of(engine, model, share, total, ranks, dtype)


def _print(fit: Fit) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for finding in fit.findings:
        mark = _MARKS[finding.verdict]
        table.add_row(f"[bold]{finding.what}[/bold]", mark, escape(finding.text))
    results.print(table, highlight=False)
