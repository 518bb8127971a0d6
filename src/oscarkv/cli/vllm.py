"""`oscarkv vllm`: before a server is started."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli import fit, options

if TYPE_CHECKING:
    from oscarkv.integrations.vllm.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Serving with vLLM.")


@app.callback()
def _group() -> None:
    """Serving with vLLM."""


@app.command("check")
def check(
    model: fit.ModelArgument,
    artifact: fit.ArtifactOption,
    memory: fit.MemoryOption = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="vLLM's option: the share of a GPU it may fill."),
    ] = None,
    gpu_memory: fit.GpuMemoryOption = None,
    max_model_len: fit.LongestOption = None,
    tensor_parallel_size: fit.RanksOption = 1,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32, as for vLLM.")
    ] = "auto",
    sink: fit.SinkOption = None,
    recent: fit.RecentOption = None,
    as_json: fit.JsonOption = False,
) -> None:
    """Say whether a model, its artifact and this vLLM fit, what the memory will hold and the cost.

    Reads the configuration and the artifact; no weights, no GPU, and no vLLM are needed. Exits
    with 1 if a server would refuse to start, with 2 if something cannot be read.

    Example: oscarkv vllm check MODEL --artifact FILE --memory 40 --max-model-len 32768
    """
    from oscarkv.integrations.serving.fit import GIB, examine
    from oscarkv.integrations.vllm.fit import VLLM
    from oscarkv.integrations.vllm.settings import Settings

    options.quiet_transformers()
    settings, ranks = (
        Settings(artifact=str(artifact), sink=sink, recent=recent),
        tensor_parallel_size,
    )
    share, option = gpu_memory_utilization, "--gpu-memory-utilization"
    found = examine(
        VLLM,
        model,
        settings,
        dtype=dtype,
        max_model_len=max_model_len,
        tensor_parallel_size=ranks,
        memory=fit.memory_for(VLLM, model, memory, share, gpu_memory, ranks, option, dtype),
    )
    given: dict[str, object] = {
        "--max-model-len": max_model_len,
        "--tensor-parallel-size": ranks if ranks > 1 else None,
        "--dtype": dtype if dtype != "auto" else None,
        "--gpu-memory-utilization": share,
        "--kv-cache-memory-bytes": None if memory is None else int(memory * GIB),
    }
    fit.report(found, as_json, _command(model, settings, given))


def _command(model: str, settings: Settings, given: dict[str, object]) -> str:
    """What to type next."""
    section = {"artifact": settings.artifact, "sink": settings.sink, "recent": settings.recent}
    section = {name: value for name, value in section.items() if value is not None}
    words = ["vllm", "serve", model, "--attention-backend", "CUSTOM"]
    words += ["--additional-config", json.dumps({"oscarkv": section})]
    return shlex.join([*words, *fit.words_of(given)])
