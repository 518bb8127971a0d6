"""Engines in processes of their own: two tensor-parallel ranks; drafts.

vLLM cannot start a second engine in a process that has looked for drafts by n-grams.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

from server_processes import run_script
from serving_models import prompts

import oscarkv

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    path, options, asked, knobs = json.loads(sys.argv[1])
    llm = LLM(
        path, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, max_num_batched_tokens=100,
        additional_config={"oscarkv": options}, **knobs,
    )
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for _ in range(2):
        out = llm.generate([{"prompt_token_ids": p} for p in asked], sampling, use_tqdm=False)
        print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in out]), flush=True)
"""


def check(tiny_model, folder: Path, asked, knobs, environment, expected=None, **options) -> None:
    options = {"artifact": str(tiny_model.artifact), "strict": True} | options
    arguments = [str(tiny_model.path), options, asked, knobs]
    done = run_script(folder, SCRIPT, arguments, environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert len(lines) == 2, done.stderr[-3000:]
    expected = expected or tiny_model.oracle(asked)
    for line in lines:  # the second time with prefix hits
        assert json.loads(line.removeprefix("TOKENS ")) == expected


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_give_the_tokens_of_one(tiny_model, tmp_path: Path):
    knobs = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    asked = prompts(5, 40, 300)
    check(tiny_model, tmp_path, asked, knobs, environment)
    attachment = oscarkv.attach(tiny_model.model, tiny_model.artifact, fold_values=True)
    try:
        folded = tiny_model.oracle(asked)
    finally:
        attachment.detach()
    check(tiny_model, tmp_path, asked, knobs, environment, folded, fold_values=True)


def test_drafts_that_are_rejected_leave_no_trace(tiny_model, tmp_path: Path):
    """Prompt lookup: steps of up to eight tokens, rolled back where the draft was wrong."""
    asked = [(list(range(10, 40)) * 20)[:length] for length in (100, 350)]
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    check(tiny_model, tmp_path, asked, {"speculative_config": speculative}, {})
