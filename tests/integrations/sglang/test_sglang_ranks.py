"""Two ranks, each with one of the model's two KV heads, in processes of their own."""

import json
import os

import pytest

pytest.importorskip("sglang.srt.plugins")

from server_processes import run_script
from serving_models import prompts

pytestmark = pytest.mark.slow
SCRIPT = """
import json
import sys

import sglang

if __name__ == "__main__":
    knobs, prompts = json.loads(sys.argv[1])
    engine = sglang.Engine(**knobs)
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    answers = []
    for _ in range(2):
        made = engine.generate(input_ids=prompts, sampling_params=sampling)
        answers.append([[x["output_ids"], x["meta_info"]["cached_tokens"]] for x in made])
    print("answers", json.dumps(answers))
    engine.shutdown()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks(tiny_model, tmp_path):
    from schedulers import KNOBS

    asked = prompts(40, 300, 700)
    ours = {
        "model_path": str(tiny_model.path),
        "attention_backend": "oscarkv",
        "oscarkv_artifact": str(tiny_model.artifact),
        "oscarkv_strict": True,
        "tp_size": 2,
    }
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    done = run_script(tmp_path, SCRIPT, [KNOBS | ours, asked], environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("answers ")]
    first, second = json.loads(line.removeprefix("answers "))
    expected = tiny_model.oracle(asked)
    assert [tokens for tokens, _ in first] == expected
    assert [tokens for tokens, _ in second] == expected
    assert [cached for _, cached in second] == [0, 256, 512]
