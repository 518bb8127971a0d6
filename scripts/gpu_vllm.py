"""vLLM with a model of random weights: capacity, decode steps, prefill. One engine a run.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python scripts/gpu_vllm.py --backend oscarkv --runner v2

Prints one JSON object a line. vLLM must be importable and oscarkv's entry point discoverable (an
installed oscarkv, or its dist-info on PYTHONPATH). Contexts of decode steps are marked computed by
vLLM's DecodeBenchConnector; for prompts that are to be prefilled it is told to stand aside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

OURS = "oscarkv"
VOCABULARY = 512  # tokens are below this, whatever the geometry
#: A step's time is that of 64 of them: (t(8 + 64 new tokens) - t(8)) / 64.
FEW, MANY = 8, 72
CONNECTOR = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 30},
}
ANSWERED = (50, 700, 3000)  # tokens of the prompts of --answers


class Load(NamedTuple):
    """BATCHxCONTEXT, or BATCHxCONTEXTxNEW."""

    batch: int
    context: int
    new: int = MANY

    @classmethod
    def parse(cls, text: str) -> Load:
        return cls(*(int(part) for part in text.split("x")))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--backend", default=OURS, help=f"{OURS}, FLASH_ATTN, TRITON_ATTN; '' is vLLM's choice")
    add("--runner", choices=["v1", "v2"], default="v2")
    add("--geometry", default="qwen3-8b")
    add("--model", type=Path, help="a directory with weights, for --answers; default: random ones")
    add("--artifact", type=Path, help="that model's")
    add("--text", type=Path, help="from which that model's prompts are cut")
    add("--steps", nargs="*", type=Load.parse, default=[], metavar="BATCHxCONTEXT")
    add("--throughput", nargs="*", type=Load.parse, default=[], metavar="BATCHxCONTEXTxNEW")
    add("--read", nargs="*", type=Load.parse, default=[], metavar="BATCHxCONTEXTxNEW",
        help="throughput with the prompts prefilled")  # fmt: skip
    add("--prefill", nargs="*", type=int, default=[], metavar="TOKENS")
    add("--kernels", type=Load.parse, metavar="BATCHxCONTEXT", help="time by GPU kernel")
    add("--answers", action="store_true", help="tokens and logprobs, to compare runs with")
    add("--offload", type=int, metavar="TOKENS", help="prompts that come back from the host")
    add("--repeats", type=int, default=3)
    add("--options", type=json.loads, default={}, help="oscarkv's, as JSON: recent, backend, ...")
    add("--engine", type=json.loads, default={}, help="further arguments of LLM, as JSON")
    add("--utilization", type=float, default=0.9)
    add("--max-num-seqs", type=int, default=32)
    add("--max-model-len", type=int, help="default: as much as is asked for")
    add("--chunk", type=int, default=8192)
    add("--eager", action="store_true")
    return parser.parse_args(words)


def emit(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def start(chosen: argparse.Namespace, folder: Path) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(chosen.runner == "v2"))
    import torch
    from vllm import LLM

    from oscarkv import Recipe
    from oscarkv.benchmark.geometry import make_model
    from oscarkv.integrations.vllm.proof import implementations

    model, artifact = chosen.model, chosen.artifact
    if model is None:
        model, artifact = make_model(chosen.geometry, folder, Recipe.named("balanced"))
    loads = [*chosen.steps, *chosen.throughput, *chosen.read, *filter(None, [chosen.kernels])]
    lengths = [load.context + max(load.new, MANY) for load in loads]
    lengths += [length + FEW for length in chosen.prefill]
    lengths += [max(ANSWERED) + MANY] * chosen.answers
    lengths += [chosen.offload + MANY] if chosen.offload else []
    longest = chosen.max_model_len or -(-max(lengths, default=32768) // 256) * 256
    knobs: dict[str, Any] = {
        "load_format": "auto" if chosen.model else "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": chosen.max_num_seqs,
        "max_num_batched_tokens": chosen.chunk,
        "gpu_memory_utilization": chosen.utilization,
        "enforce_eager": chosen.eager,
        "kv_transfer_config": CONNECTOR,
    }
    if chosen.offload:
        knobs |= {"kv_transfer_config": OFFLOAD, "enable_prefix_caching": True}
    knobs |= chosen.engine
    if chosen.backend == OURS:
        knobs["attention_backend"] = "CUSTOM"
        knobs["additional_config"] = {OURS: {"artifact": str(artifact)} | chosen.options}
    elif chosen.backend:
        knobs["attention_backend"] = chosen.backend
    begin = time.perf_counter()
    llm = LLM(str(model), **knobs)
    seconds = time.perf_counter() - begin
    config = llm.llm_engine.vllm_config
    emit(
        "engine",
        backend=chosen.backend,
        implementation=implementations(config),
        runner=type(runner_of(llm)).__module__,
        start_s=round(seconds, 1),
        capacity_tokens=config.cache_config.kv_cache_size_tokens,
        concurrency=config.cache_config.kv_cache_max_concurrency,
        blocks=config.cache_config.num_gpu_blocks,
        max_model_len=longest,
        max_num_seqs=chosen.max_num_seqs,
        graphs=str(config.compilation_config.cudagraph_mode),
        captured=graphs_captured(),
        options=chosen.options,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )
    return llm


def graphs_captured() -> int:
    from vllm.compilation.counter import compilation_counter

    return int(compilation_counter.num_cudagraph_captured)


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm: Any) -> Any:
    return core_of(llm).model_executor.driver_worker.worker.model_runner


# -- requests --------------------------------------------------------------------------------------


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def generate(llm: Any, prompts: list[list[int]], new: int, logprobs: int | None = None) -> Any:
    """Outputs, and seconds from the first request to the last token."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    begin = time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return outputs, time.perf_counter() - begin


@contextmanager
def prefilling(llm: Any) -> Iterator[None]:
    """The connector that marks contexts as computed finds none."""
    transfer = core_of(llm).vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR["kv_connector"]:
        yield
        return
    scheduler = core_of(llm).scheduler.connector.connector_scheduler
    scheduler.get_num_new_matched_tokens = lambda *_: (0, False)
    try:
        yield
    finally:
        del scheduler.get_num_new_matched_tokens


# -- figures ---------------------------------------------------------------------------------------


def step_times(llm: Any, load: Load, repeats: int) -> None:
    prompts = [prompt(load.context)] * load.batch
    generate(llm, prompts, MANY)  # compiles what is left to compile
    times = []
    for _ in range(repeats):
        few, many = (generate(llm, prompts, new)[1] for new in (FEW, MANY))
        times.append(1000 * (many - few) / (MANY - FEW))
    emit(
        "step",
        batch=load.batch,
        context=load.context,
        ms=round(statistics.median(times), 3),
        all_ms=[round(x, 3) for x in times],
    )


def throughput(llm: Any, load: Load, *, read: bool = False) -> None:
    prompts = [prompt(load.context)] * load.batch
    with prefilling(llm) if read else nullcontext():
        generate(llm, prompts[:1], FEW)
        _, seconds = generate(llm, prompts, load.new)
    speed = load.batch * load.new / seconds
    emit("throughput", **load._asdict(), prompts_read=read, s=seconds, tokens_s=speed)


def prefill(llm: Any, length: int, repeats: int) -> None:
    with prefilling(llm):
        generate(llm, [prompt(length)], 1)
        times = [generate(llm, [prompt(length)], 1)[1] for _ in range(repeats)]
    emit("prefill", tokens=length, s=times, tokens_s=round(length / statistics.median(times)))


def kernels(llm: Any, load: Load, shown: int = 14) -> None:
    """Microseconds a step of the GPU kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    prompts, steps = [prompt(load.context)] * load.batch, 16
    generate(llm, prompts, FEW)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        generate(llm, prompts, steps)
    found = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    table = [
        [event.key[:90], round(event.count / steps, 1), round(event.device_time_total / steps, 1)]
        for event in found[:shown]
    ]
    emit("kernels", batch=load.batch, context=load.context, columns="name, calls, us", rows=table)


def offload(llm: Any, length: int, count: int = 3) -> None:
    """The same prompts twice: read, and brought back after the cache on the device was emptied."""
    asked = [prompt(length, seed) for seed in range(count)]
    sharpen(llm)
    for again in (False, True):
        runs = [generate(llm, [one], 16, logprobs=1) for one in asked]
        outputs = [found[0] for found, _ in runs]
        emit(
            "offload",
            again=again,
            tokens=length,
            found=[output.num_cached_tokens for output in outputs],
            s=[round(seconds, 3) for _, seconds in runs],
            answers=[list(output.outputs[0].token_ids) for output in outputs],
        )
        time.sleep(1)  # copies to the host go on behind the answers
        generate(llm, [prompt(50, 99)], 4)
        assert llm.reset_prefix_cache()


def text_prompts(model: Path, text: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8")).input_ids
    return [tokens[:length] for length in ANSWERED]


def answers(llm: Any, chosen: argparse.Namespace) -> None:
    """Greedy answers, alone and in a batch."""
    if chosen.model:
        prompts = text_prompts(chosen.model, chosen.text)
    else:
        sharpen(llm)
        prompts = [prompt(length, length) for length in ANSWERED]
    with prefilling(llm):
        batches = [generate(llm, [one], 32, logprobs=1)[0] for one in prompts]
        batches.append(generate(llm, prompts, 32, logprobs=1)[0])
    for outputs in batches:
        for output in outputs:
            made = output.outputs[0]
            chances = [
                round(entry[token].logprob, 4)
                for token, entry in zip(made.token_ids, made.logprobs, strict=True)
            ]
            emit(
                "answer",
                prompt=len(output.prompt_token_ids),
                batch=len(outputs),
                tokens=list(made.token_ids),
                logprobs=chances,
            )


def sharpen(llm: Any) -> None:
    """Weights that make attention matter, in place: graphs read them there."""
    import torch

    model = runner_of(llm).model
    with torch.inference_mode():
        for index, (name, weight) in enumerate(sorted(model.named_parameters())):
            rng = torch.Generator(weight.device).manual_seed(index)
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5, generator=rng)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    with tempfile.TemporaryDirectory() as folder:
        llm = start(chosen, Path(folder))
        for load in chosen.steps:
            step_times(llm, load, chosen.repeats)
        for load in chosen.throughput:
            throughput(llm, load)
        for load in chosen.read:
            throughput(llm, load, read=True)
        for length in chosen.prefill:
            prefill(llm, length, chosen.repeats)
        if chosen.kernels:
            kernels(llm, chosen.kernels)
        if chosen.offload:
            offload(llm, chosen.offload)
        if chosen.answers:
            answers(llm, chosen)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
