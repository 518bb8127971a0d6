"""`oscarkv bench serving`: what a server gains, measured through the engine itself."""

from __future__ import annotations

import datetime
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oscarkv.cli import options
from oscarkv.cli.console import errors, interruptible, results
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.benchmark.serving_plan import EnginePlan

FAILED = 1
TABLE_WIDTH = 150
GIB = 1 << 30
#: vLLM's own means of marking contexts as computed.
CONNECTOR = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def serving(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model directory or hub id; or --geometry."),
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's artifact.")
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(help="Random weights of this shape: qwen3-4b, qwen3-8b, qwen3-32b or tiny."),
    ] = None,
    engine: Annotated[str, typer.Option(help="The serving engine: vllm or sglang.")] = "vllm",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Draw them here: .svg or .png.")
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="oscarkv and the engine's own attention backends, in this order.",
            show_default="FLASH_ATTN,TRITON_ATTN,oscarkv; without a GPU CPU_ATTN,oscarkv; with "
            "sglang fa3,triton,oscarkv and torch_native,oscarkv",
        ),
    ] = "",
    shapes: Annotated[
        str,
        typer.Option(
            metavar="BxC,...",
            help="Batch x context of the decode steps; or none.",
            show_default="1x8k,1x32k,32x1k,32x8k,32x16k,16x32k; without a GPU 1x512,2x512",
        ),
    ] = "",
    prompts: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Lengths of the prompts whose first token is timed, where they are read; or none.",
            show_default="the contexts of --shapes",
        ),
    ] = "",
    requests: Annotated[
        int | None, typer.Option(min=0, help="Requests that arrive at once; 0: none.")
    ] = None,
    request_context: Annotated[int | None, typer.Option(min=1, help="Their prompts.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="Their answers.")] = None,
    prefill: Annotated[
        str,
        typer.Option(
            help="computed: contexts are marked as computed; real: they are read; both: decoding "
            "with the first, times to first token with the second.",
            show_default="both; without a GPU, real",
        ),
    ] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Of every figure; medians count.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a figure.")] = 64,
    sink: Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    recent: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory for the KV cache, instead of a share."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="The share of a GPU to fill.")
    ] = 0.9,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, show_default="32 to 256, as the requests need")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=16, help="Of a step; a chunk.")] = 8192,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.")] = False,
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="NAME=JSON",
            help="Any other argument of vllm.LLM or sglang.Engine; repeat for more.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one engine may take.")] = 1800,
) -> None:
    """Send the same requests to an engine with its own cache and with oscarkv's, and compare.

    KV capacity in tokens, time of a decode step over batch and context, time to first token,
    inter-token latency and throughput. Every engine has a process of its own. What is there is
    written after every figure.

    Example: oscarkv bench serving --geometry qwen3-8b --json serving.json --plot serving.svg
    """
    for path in filter(None, (json_file, plot_file)):
        options.require_writable(path)

    import torch

    from oscarkv.benchmark import serving_report
    from oscarkv.benchmark.serving import ServingRecord, bench_serving
    from oscarkv.benchmark.serving_plan import (
        BOTH,
        COMPUTED,
        KINDS,
        PREFILLS,
        REAL,
        SGLANG,
        EnginePlan,
        Load,
        Shape,
        parse_length,
    )

    if engine not in KINDS:
        raise OscarError(f"unknown engine {engine!r}; known: {', '.join(KINDS)}")
    if plot_file is not None:
        serving_report.require_matplotlib()
        if plot_file.suffix not in (".svg", ".png"):
            raise OscarError(f"--plot {plot_file}: name a .svg or .png file")
    on_gpu = torch.cuda.is_available()
    if prefill == "auto":
        prefill = BOTH if on_gpu else REAL
    if prefill not in PREFILLS:
        raise OscarError(f"--prefill {prefill}: use {', '.join(PREFILLS)}")
    asked = [Shape.parse(part) for part in _listed(shapes or _shapes(on_gpu))]
    names = _listed(engines or _engines(engine, on_gpu))
    lengths = [parse_length(part) for part in _listed(prompts)]
    lengths = lengths if prompts else sorted({shape.context for shape in asked})
    count = (128 if on_gpu else 4) if requests is None else requests
    load = Load(
        count,
        request_context or (32768 if on_gpu else 512),
        new_tokens or (512 if on_gpu else 16),
    )
    sequences = max_num_seqs or min(256, max(32, count, *(shape.batch for shape in asked)))
    extra = options.engine_options(engine_options or [])
    if engine == SGLANG:
        arguments = _sglang_arguments(on_gpu, eager, sequences, max_num_batched_tokens)
        arguments |= {"mem_fraction_static": gpu_memory_utilization} if on_gpu else {}
        common = arguments | extra
    else:
        common = {
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max_num_batched_tokens,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": eager,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            **({} if prefill == REAL else {"kv_transfer_config": CONNECTOR}),
            **extra,
        }
        if memory is not None:
            common["kv_cache_memory_bytes"] = int(memory * GIB)

    with _model(geometry, model, artifact) as (source, file, vocabulary, dummy):
        common |= {"load_format": "dummy"} if dummy else {}
        section = {"artifact": str(file), "sink": sink, "recent": recent}
        section = {name: value for name, value in section.items() if value is not None}

        def plan(name: str) -> EnginePlan:
            settings = dict(common)
            if engine == SGLANG:
                settings["attention_backend"] = name
                if name == "oscarkv":
                    settings |= {f"oscarkv_{key}": value for key, value in section.items()}
            elif name == "oscarkv":
                settings["additional_config"] = {"oscarkv": section}
            # Elsewhere there is one only, and the plugin stands in for it.
            if on_gpu and engine != SGLANG:
                settings["attention_backend"] = "CUSTOM" if name == "oscarkv" else name
            return EnginePlan(
                name=name,
                model=source,
                engine=settings,
                prefill=prefill,
                vocabulary=vocabulary,
                shapes=asked,
                load=load if count else None,
                prompts=[] if prefill == COMPUTED else lengths,
                steps=steps,
                repeats=repeats,
                kind=engine,
            )

        if not names:
            raise OscarError("nothing to measure: no --engines")
        plans = [plan(name) for name in names]
        longest = max(each.longest for each in plans)  # the same for all, or capacities differ
        if not longest:
            raise OscarError("nothing to measure: no --shapes, no --prompts and no --requests")
        length = "context_length" if engine == SGLANG else "max_model_len"
        longest += 8 if engine == SGLANG else 0  # tokens that it keeps back
        for each in plans:
            each.engine.setdefault(length, longest)
            if engine == SGLANG and memory is not None:
                each.engine["max_total_tokens"] = _sglang_tokens(
                    each, int(memory * GIB), section, each.engine[length]
                )
        record = ServingRecord(_about(geometry or Path(str(model)).name, plans, on_gpu))

        def save() -> None:
            if json_file is not None:
                record.save(json_file)

        with interruptible("what was measured is", json_file):
            bench_serving(plans, record, timeout=timeout, save=save, say=_say)
    results.print(serving_report.headline(record), highlight=False, soft_wrap=True)
    wide = Console(width=max(results.width, TABLE_WIDTH))
    for table in serving_report.tables(record):
        wide.print(table)
    if plot_file is not None and any(run.started for run in record.runs):
        serving_report.plot(record, plot_file)
    if record.failed:
        raise typer.Exit(FAILED)


def _shapes(on_gpu: bool) -> str:
    return "1x8k,1x32k,32x1k,32x8k,32x16k,16x32k" if on_gpu else "1x512,2x512"


def _sglang_arguments(on_gpu: bool, eager: bool, sequences: int, chunk: int) -> dict[str, Any]:
    common: dict[str, Any] = {
        "dtype": "bfloat16" if on_gpu else "float32",
        "device": "cuda" if on_gpu else "cpu",
        "max_running_requests": sequences,
        "chunked_prefill_size": chunk,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "disable_cuda_graph": eager or not on_gpu,
    }
    if not on_gpu:
        common |= {"sampling_backend": "pytorch", "grammar_backend": "none"}
        common["disable_overlap_schedule"] = True
    return common


def _sglang_tokens(plan: EnginePlan, memory: int, section: dict[str, Any], length: int) -> int:
    """SGLang takes no bytes: the tokens that it would have made of them."""
    from oscarkv.integrations.serving.fit import cache_dtype, geometry_of
    from oscarkv.integrations.serving.settings import Settings
    from oscarkv.integrations.sglang.capacity import Capacity
    from oscarkv.integrations.transformers.models import load_config

    config = load_config(plan.model)
    model = geometry_of(config, plan.model).identity
    recipe, dtype = Settings(**section).recipe, cache_dtype(config, plan.engine["dtype"])
    heads = max(1, model.kv_heads // int(plan.engine.get("tp_size", 1)))  # of a GPU
    capacity = Capacity(model.layers, heads, model.head_dim, dtype, recipe, length)
    return capacity.tokens(memory) if plan.name == "oscarkv" else capacity.plain_tokens(memory)


def _engines(engine: str, on_gpu: bool) -> str:
    if engine == "sglang":
        return "fa3,triton,oscarkv" if on_gpu else "torch_native,oscarkv"
    return "FLASH_ATTN,TRITON_ATTN,oscarkv" if on_gpu else "CPU_ATTN,oscarkv"


def _listed(text: str) -> list[str]:
    return [] if text.strip() == "none" else [part.strip() for part in text.split(",") if part]


@contextmanager
def _model(
    geometry: str | None, model: str | None, artifact: Path | None
) -> Iterator[tuple[str, Path, int, bool]]:
    """The model, its artifact, the size of its vocabulary, and whether to invent its weights."""
    if (geometry is None) == (model is None):
        raise OscarError("give either a MODEL with --artifact, or --geometry")
    if geometry is not None:
        from oscarkv.benchmark import geometry as shapes
        from oscarkv.recipe import Recipe

        config = shapes.geometry(geometry)
        with tempfile.TemporaryDirectory(prefix="oscarkv-serving-") as folder:
            with errors.status(f"making an artifact of {geometry}'s shape"):
                made = Path(folder)
                path, file = shapes.make_model(geometry, made, Recipe.named("balanced"))
            yield str(path), file, config["vocab_size"], True
        return
    if artifact is None:
        raise OscarError("a MODEL needs its --artifact; make one with: oscarkv calibrate")
    options.require_files([artifact])
    from oscarkv.integrations.transformers.models import load_config

    assert model is not None
    text = load_config(model).get_text_config(decoder=True)
    yield model, artifact.resolve(), int(text.vocab_size), False


def _about(model: str, plans: list[EnginePlan], on_gpu: bool) -> dict[str, Any]:
    from oscarkv.benchmark import machine

    gpu = machine.gpus()[0] if on_gpu else None
    ours = ("additional_config", "oscarkv_")
    plain = {k: v for k, v in plans[0].engine.items() if not k.startswith(ours)}
    return {
        "engine": plans[0].kind,
        "model": model,
        "device": gpu.name if gpu else machine.processor(),
        "command": shlex.join(["oscarkv", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": machine.versions(),
        "driver": machine.driver() if on_gpu else None,
        "settings": {k: v for k, v in plain.items() if k != "attention_backend"},
        "steps": plans[0].steps,
        "repeats": plans[0].repeats,
    }


def _say(what: str) -> None:
    errors.print(what, markup=False, highlight=False, soft_wrap=True)
