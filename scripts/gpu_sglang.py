"""SGLang with random weights: capacity, decode steps, prefill, answers. One engine a run.

    python scripts/gpu_sglang.py --backend oscarkv --steps 32x16384 1x100000
    python scripts/gpu_sglang.py --backend oscarkv --throughput 128x32768x512 --max-running 128
    python scripts/gpu_sglang.py --backend oscarkv --answers --options '{"recent": 4096}' > ours.txt
    python scripts/gpu_sglang.py --compare stock.txt ours.txt

Prints one JSON object a line. SGLang must be importable and oscarkv's entry point discoverable (an
installed oscarkv, or its dist-info on PYTHONPATH). Contexts are read; with --throughput they count
as computed: their prompts are scheduled and given memory, and no model runs. Answers are those of a
small model whose weights make attention matter; the engine's dummy weights, which the other figures
are taken with, say the same token all the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OURS = "oscarkv"
VOCABULARY = 512  # tokens are below this, whatever the geometry
ANSWERED = (50, 700, 3000)  # tokens of the prompts of --answers
NEW = 64  # of an answer
#: Of the model of --answers. Keys and values have the shapes of Qwen3-8B, the rest is small.
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
}
ON_CPU = {
    "device": "cpu",
    "dtype": "float32",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--backend", default=OURS, help=f"{OURS}, or SGLang's own: fa3, triton, torch_native")
    add("--geometry", default="qwen3-8b")
    add("--layers", type=int, help="fewer than the geometry's")
    add("--steps", nargs="*", default=[], metavar="BATCHxCONTEXT")
    add("--throughput", type=load, metavar="REQUESTSxCONTEXTxNEW", help="contexts computed")
    add("--prefill", nargs="*", type=int, default=[], metavar="TOKENS")
    add("--answers", action="store_true", help="tokens and logprobs, to compare runs with")
    add("--compare", nargs=2, type=Path, metavar="FILE", help="what two runs of --answers wrote")
    add("--repeats", type=int, default=1)
    add("--options", type=json.loads, default={}, help="oscarkv's, as JSON: recent, backend, ...")
    add("--engine", type=json.loads, default={}, help="further arguments of Engine, as JSON")
    add("--memory-fraction", type=float, default=0.88, help="weights and KV cache, of the GPU")
    add("--max-running", type=int, default=32)
    add("--chunk", type=int, default=8192)
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--overlap", action="store_true", help="SGLang's overlapped scheduler")
    return parser.parse_args(words)


def load(text: str) -> tuple[int, int, int]:
    requests, context, new = map(int, text.split("x"))
    return requests, context, new


def emit(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


# -- models ----------------------------------------------------------------------------------------


def make_model(chosen: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """A model directory and an artifact; with weights only where answers are asked for."""
    import torch

    from oscarkv import Recipe
    from oscarkv.artifact import save_artifact
    from oscarkv.benchmark.geometry import geometry, random_artifact

    config = geometry(chosen.geometry) | (SMALL if chosen.answers else {})
    config |= {"num_hidden_layers": chosen.layers} if chosen.layers else {}
    model, artifact = folder / "model", folder / "model.safetensors"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_artifact(random_artifact("random", config, Recipe.named("balanced")), artifact)
    if chosen.answers:
        dtype = torch.float32 if chosen.engine.get("device") == "cpu" else torch.bfloat16
        write_weights(config, model, dtype)
    return model, artifact


def write_weights(config: dict[str, Any], model: Path, dtype: Any) -> None:
    """Large enough that what is attended to decides about the next token."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    shapes["lm_head"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.post_attention_layernorm": (hidden,),
            f"{layer}.self_attn.q_norm": (dim,),
            f"{layer}.self_attn.k_norm": (dim,),
            f"{layer}.self_attn.q_proj": (heads, hidden),
            f"{layer}.self_attn.k_proj": (kv, hidden),
            f"{layer}.self_attn.v_proj": (kv, hidden),
            f"{layer}.self_attn.o_proj": (hidden, heads),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
    rng = torch.Generator().manual_seed(0)

    def weight(shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return (torch.randn(shape, generator=rng) * 2 * shape[-1] ** -0.5).to(dtype)

    weights = {f"{name}.weight": weight(shape) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


# -- the engine ------------------------------------------------------------------------------------


def start(chosen: argparse.Namespace, folder: Path) -> Any:
    import torch

    from oscarkv.benchmark import serving_sglang
    from oscarkv.benchmark.serving_plan import COMPUTED, REAL, SGLANG, EnginePlan, Load, Shape

    model, artifact = make_model(chosen, folder)
    shapes = [Shape.parse(text) for text in chosen.steps]
    knobs: dict[str, Any] = {
        "attention_backend": chosen.backend,
        "load_format": "auto" if chosen.answers else "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "chunked_prefill_size": chosen.chunk,
        "max_prefill_tokens": chosen.chunk,
        "max_running_requests": chosen.max_running,
        "mem_fraction_static": chosen.memory_fraction,
        "cuda_graph_backend_prefill": "disabled",
        "disable_overlap_schedule": not chosen.overlap,
        "disable_radix_cache": not chosen.answers,
        "log_level": "info",
    }
    if chosen.eager:
        knobs["cuda_graph_backend_decode"] = "disabled"
    else:
        knobs["cuda_graph_max_bs_decode"] = chosen.max_running
    if chosen.engine.get("device") == "cpu":
        for name in [name for name in knobs if name.startswith("cuda_graph")]:
            del knobs[name]
        knobs |= ON_CPU
    if chosen.backend == OURS:
        knobs |= {f"{OURS}_{name}": value for name, value in chosen.options.items()}
        knobs[f"{OURS}_artifact"] = str(artifact)
    knobs |= chosen.engine
    plan = EnginePlan(
        chosen.backend,
        str(model),
        knobs,
        COMPUTED if chosen.throughput else REAL,
        VOCABULARY,
        shapes,
        load=Load(*chosen.throughput) if chosen.throughput else None,
        prompts=[*chosen.prefill, *([max(ANSWERED) + NEW] if chosen.answers else [])],
        repeats=chosen.repeats,
        kind=SGLANG,
    )
    knobs.setdefault("context_length", max(4096, -(-plan.longest // 1024) * 1024))
    begin = time.perf_counter()
    driver, about = serving_sglang.start(plan)
    emit(
        "engine",
        backend=chosen.backend,
        start_s=round(time.perf_counter() - begin, 1),
        capacity_tokens=about["kv_tokens"],
        context_length=about["max_model_len"],
        graphs=not chosen.eager and knobs.get("device") != "cpu",
        overlap=chosen.overlap,
        options=chosen.options,
        layers=chosen.layers,
        memory_fraction=chosen.memory_fraction,
        attention=about["attention"],
        dtype=about["dtype"],
        sglang=installed("sglang"),
        kernel=installed("sglang-kernel"),
        flashinfer=installed("flashinfer-python"),
        torch=torch.__version__,
        python=platform.python_version(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )
    return driver


# -- figures ---------------------------------------------------------------------------------------


def step_times(driver: Any, repeats: int) -> None:
    from oscarkv.benchmark.serving_worker import DoesNotFit

    for shape in driver.plan.shapes:
        begin = time.perf_counter()
        try:
            with driver.contexts(driver.plan.step_contexts):
                times = [1000 * driver.step_time(shape) for _ in range(repeats)]
        except DoesNotFit as reason:
            emit("step", batch=shape.batch, context=shape.context, error=str(reason))
            continue
        emit(
            "step",
            batch=shape.batch,
            context=shape.context,
            ms=round(statistics.median(times), 3),
            all_ms=[round(x, 3) for x in times],
            took_s=round(time.perf_counter() - begin, 1),
        )


def throughput(driver: Any) -> None:
    from oscarkv.benchmark.serving_plan import COMPUTED

    driver.warm_up()
    with driver.contexts(COMPUTED):
        found = driver.serve(driver.plan.load)
    emit("throughput", **vars(driver.plan.load), **found)


def prefill(driver: Any, length: int, repeats: int) -> None:
    driver.first_token(length)
    times = [driver.first_token(length) for _ in range(repeats)]
    emit("prefill", tokens=length, s=times, tokens_s=round(length / statistics.median(times)))


def answers(driver: Any) -> None:
    """Greedy answers: alone, in a batch, and once more, when the radix cache has the prompts."""
    import random

    prompts = [random.Random(n).choices(range(3, VOCABULARY), k=n) for n in ANSWERED]
    for kind, groups in (
        ("alone", [[one] for one in prompts]),
        ("batch", [[one[::-1] for one in prompts]]),
        ("again", [prompts]),
    ):
        for group in groups:
            made = driver.engine.generate(
                input_ids=group,
                sampling_params={"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
                return_logprob=True,
            )
            for asked, one in zip(group, made, strict=True):
                facts = one["meta_info"]
                emit(
                    "answer",
                    kind=kind,
                    prompt=len(asked),
                    cached=facts["cached_tokens"],
                    tokens=[entry[1] for entry in facts["output_token_logprobs"]],
                    logprobs=[round(entry[0], 4) for entry in facts["output_token_logprobs"]],
                )


def compare(first: Path, second: Path) -> None:
    """Where the answers of two runs part, and how far their logprobs are apart until then."""

    def read(path: Path) -> list[dict[str, Any]]:
        rows = [json.loads(x) for x in path.read_text().splitlines() if x.startswith("{")]
        return [row for row in rows if row["what"] == "answer"]

    for a, b in zip(read(first), read(second), strict=True):
        pairs = list(zip(a["tokens"], b["tokens"], strict=True))
        same = next((at for at, (x, y) in enumerate(pairs) if x != y), len(pairs))
        apart = [abs(x - y) for x, y in zip(a["logprobs"], b["logprobs"], strict=True)][: same + 1]
        emit(
            "compared",
            kind=a["kind"],
            prompt=a["prompt"],
            same=same,
            of=len(pairs),
            largest_logprob_difference=round(max(apart), 4),
            cached=[a["cached"], b["cached"]],
        )


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    if chosen.compare:
        compare(*chosen.compare)
        return
    with tempfile.TemporaryDirectory() as folder:
        driver = start(chosen, Path(folder))
        try:
            if chosen.answers:
                answers(driver)
            if chosen.steps:
                driver.warm_up()
                step_times(driver, chosen.repeats)
            if chosen.throughput:
                throughput(driver)
            for length in chosen.prefill:
                prefill(driver, length, chosen.repeats)
        finally:
            driver.engine.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
