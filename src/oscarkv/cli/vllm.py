"""`oscarkv vllm`: before a server is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli import options
from oscarkv.cli.console import errors, results
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.integrations.vllm.fit import Fit, Memory
    from oscarkv.integrations.vllm.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Serving with vLLM.")

DOES_NOT_FIT = 1
_MARKS = {"good": "[green]good[/green]", "warning": "[yellow]note[/yellow]",
          "problem": "[red]problem[/red]"}  # fmt: skip


@app.callback()
def _group() -> None:
    """Serving with vLLM."""


@app.command("check")
def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model directory or a hub id (org/name).")
    ],
    artifact: Annotated[Path, typer.Option(metavar="FILE", help="The model's artifact.")],
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory for the KV cache, of each GPU."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="vLLM's option: the share of a GPU it may fill."),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="A GPU's memory.", show_default="that of the GPU here"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest request.", show_default="the model's context"),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs a model.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32, as for vLLM.")
    ] = "auto",
    sink: Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    recent: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say whether a model, its artifact and this vLLM fit, what the memory will hold and the cost.

    Reads the configuration and the artifact; no weights, no GPU, and no vLLM are needed. Exits
    with 1 if a server would refuse to start, with 2 if something cannot be read.

    Example: oscarkv vllm check MODEL --artifact FILE --memory 40 --max-model-len 32768
    """
    from oscarkv.integrations.vllm.fit import examine
    from oscarkv.integrations.vllm.settings import Settings

    options.quiet_transformers()
    settings = Settings(artifact=str(artifact), sink=sink, recent=recent)
    found = examine(
        model,
        settings,
        dtype=dtype,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        memory=_memory(model, memory, gpu_memory_utilization, gpu_memory, tensor_parallel_size),
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    if not found.good:
        errors.print("a server would refuse to start", highlight=False)
        raise typer.Exit(DOES_NOT_FIT)
    if not as_json:
        command = _command(model, settings, max_model_len, tensor_parallel_size)
        results.print(command, markup=False, highlight=False, soft_wrap=True)


def _memory(
    model: str, memory: float | None, share: float | None, gpu: float | None, ranks: int
) -> Memory | None:
    from oscarkv.integrations.vllm.fit import GIB, Memory, memory_of

    for name, value in (("--memory", memory), ("--gpu-memory", gpu)):
        if value is not None and value <= 0:
            raise OscarError(f"{name} {value:g}: give a number of GiB above 0")
    if memory is not None:
        if share is not None or gpu is not None:
            raise OscarError("give either --memory or --gpu-memory-utilization, not both")
        return Memory(int(memory * GIB), "as given")
    if share is None:
        if gpu is not None:
            raise OscarError("--gpu-memory goes with --gpu-memory-utilization")
        return None
    if not 0 < share <= 1:
        raise OscarError(f"--gpu-memory-utilization {share:g}: give a share above 0, at most 1")
    if gpu is not None:
        return memory_of(model, share, int(gpu * GIB), ranks)
    import torch

    if not torch.cuda.is_available():
        raise OscarError("there is no GPU here whose memory could be asked for; give --gpu-memory")
    total = torch.cuda.get_device_properties(0).total_memory
    return memory_of(model, share, total, ranks)


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


def _command(model: str, settings: Settings, max_model_len: int | None, ranks: int) -> str:
    """What to type next."""
    section = {"artifact": settings.artifact, "sink": settings.sink, "recent": settings.recent}
    section = {name: value for name, value in section.items() if value is not None}
    words = ["vllm", "serve", model, "--attention-backend", "CUSTOM"]
    words += ["--additional-config", json.dumps({"oscarkv": section})]
    words += [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    words += [] if ranks == 1 else ["--tensor-parallel-size", str(ranks)]
    return shlex.join(words)
