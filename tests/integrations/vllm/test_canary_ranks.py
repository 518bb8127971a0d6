"""Two tensor-parallel ranks rescore together, in processes of their own."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

from server_processes import run_script
from serving_models import prompts

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    path, artifact, tokens = json.loads(sys.argv[1])
    llm = LLM(
        path, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, tensor_parallel_size=2, distributed_executor_backend="mp",
        additional_config={"oscarkv": {"artifact": artifact, "canary": {}}},
    )
    for _ in range(2):
        print("RANKS", json.dumps(llm.collective_rpc("oscarkv_rescore", args=(tokens,))))
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    print("SERVES", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_say_what_one_says(tiny_model, tmp_path: Path):
    tokens = prompts(400, seed=3)[0]
    with tiny_model.engine({"canary": {}}) as engine:
        (alone,) = engine.llm.collective_rpc("oscarkv_rescore", args=(tokens,))
    arguments = [str(tiny_model.path), str(tiny_model.artifact), tokens]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = run_script(tmp_path, SCRIPT, arguments, environment)
    lines = done.stdout.splitlines()
    found = [json.loads(x.removeprefix("RANKS ")) for x in lines if x.startswith("RANKS ")]
    assert len(found) == 2, done.stderr[-3000:]
    assert "SERVES" in lines
    for ranks in found:
        assert len(ranks) == 2
        known = [rank for rank in ranks if rank["kl"] is not None]
        assert known
        for rank in known:
            assert rank["kl"] == pytest.approx(alone["kl"], rel=0.02)
            assert rank["agreement"] == pytest.approx(alone["agreement"], abs=0.02)
        # Each rank knows its own head: the mean over both is what one rank says of a layer.
        assert max(rank["drift"] for rank in ranks) >= alone["drift"] * 0.999
