"""`oscarkv sglang`: before a server is started."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli import fit, options

if TYPE_CHECKING:
    from oscarkv.integrations.serving.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Serving with SGLang.")


@app.callback()
def _group() -> None:
    """Serving with SGLang."""


@app.command("check")
def check(
    model: fit.ModelArgument,
    artifact: fit.ArtifactOption,
    memory: fit.MemoryOption = None,
    mem_fraction_static: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="SGLang's option: the share of a GPU it may fill."),
    ] = None,
    gpu_memory: fit.GpuMemoryOption = None,
    context_length: fit.LongestOption = None,
    tp_size: fit.RanksOption = 1,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32, as for SGLang.")
    ] = "auto",
    sink: fit.SinkOption = None,
    recent: fit.RecentOption = None,
    as_json: fit.JsonOption = False,
) -> None:
    """Say whether a model, its artifact and this SGLang fit, what memory will hold and the cost.

    Reads the configuration and the artifact; no weights, no GPU, and no SGLang are needed. Exits
    with 1 if a server would refuse to start, with 2 if something cannot be read.

    Example: oscarkv sglang check MODEL --artifact FILE --memory 40 --context-length 32768
    """
    from oscarkv.integrations.serving.fit import examine
    from oscarkv.integrations.serving.settings import Settings
    from oscarkv.integrations.sglang.fit import SGLANG

    options.quiet_transformers()
    settings, ranks = Settings(artifact=str(artifact), sink=sink, recent=recent), tp_size
    share, option = mem_fraction_static, "--mem-fraction-static"
    found = examine(
        SGLANG,
        model,
        settings,
        dtype=dtype,
        max_model_len=context_length,
        tensor_parallel_size=ranks,
        memory=fit.memory_for(SGLANG, model, memory, share, gpu_memory, ranks, option, dtype),
    )
    given: dict[str, object] = {  # SGLang has no option for the cache's bytes
        "--oscarkv-sink": sink,
        "--oscarkv-recent": recent,
        "--context-length": context_length,
        "--tp-size": ranks if ranks > 1 else None,
        "--dtype": dtype if dtype != "auto" else None,
        "--mem-fraction-static": share,
    }
    fit.report(found, as_json, _command(model, settings, given))


def _command(model: str, settings: Settings, given: dict[str, object]) -> str:
    """What to type next."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--attention-backend", "oscarkv", "--oscarkv-artifact", settings.artifact]
    return shlex.join([*words, *fit.words_of(given)])
