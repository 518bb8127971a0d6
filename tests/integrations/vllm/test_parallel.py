"""Two tensor-parallel ranks, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

from engines import prompts

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    path, artifact, asked = json.loads(sys.argv[1])
    llm = LLM(
        path, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, max_num_batched_tokens=100, tensor_parallel_size=2,
        distributed_executor_backend="mp",
        additional_config={"oscarkv": {"artifact": artifact, "strict": True}},
    )
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    for _ in range(2):
        out = llm.generate([{"prompt_token_ids": p} for p in asked], sampling, use_tqdm=False)
        print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in out]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_give_the_tokens_of_one(tiny_model, tmp_path: Path):
    asked = prompts(5, 40, 300)
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    arguments = json.dumps([str(tiny_model.path), str(tiny_model.artifact), asked])
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    done = subprocess.run(
        [sys.executable, str(script), arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert len(lines) == 2, done.stderr[-3000:]
    expected = tiny_model.oracle(asked)
    for line in lines:  # the second time with prefix hits
        assert json.loads(line.removeprefix("TOKENS ")) == expected
