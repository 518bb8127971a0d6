"""Random requests, aborts, shared prefixes, a small cache: no block is lost, nothing changes."""

import random

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts


def test_random_requests_leave_nothing_behind(tiny_model):
    from vllm import SamplingParams

    chooser = random.Random(7)
    (canary,) = prompts(500, seed=8)
    shared = prompts(300, 650, seed=9)
    with tiny_model.engine(
        {"strict": True},
        enable_prefix_caching=True,
        max_num_batched_tokens=192,
        num_gpu_blocks_override=140,
        max_model_len=1024,
    ) as engine:
        expected = engine.generate([canary])
        core = engine.llm.llm_engine
        waiting, made, alive = 60, 0, set()
        while waiting or core.has_unfinished_requests():
            if waiting and chooser.random() < 0.3:
                prompt = prompts(chooser.randint(1, 250), seed=1000 + made)[0]
                if chooser.random() < 0.5:
                    whole = chooser.choice(shared)
                    prompt = whole[: chooser.randint(1, len(whole))] + prompt
                name = f"canary-{made}" if made % 10 == 5 else f"request-{made}"
                if name.startswith("canary"):
                    prompt = canary
                new = 24 if name.startswith("canary") else chooser.randint(1, 60)
                sampling = SamplingParams(
                    temperature=0, max_tokens=new, ignore_eos=True, detokenize=False
                )
                core.add_request(name, {"prompt_token_ids": prompt}, sampling)
                alive.add(name)
                waiting, made = waiting - 1, made + 1
            for output in core.step():
                if output.finished:
                    alive.discard(output.request_id)
                    if output.request_id.startswith("canary"):
                        assert list(output.outputs[0].token_ids) == expected[0]
            if alive and chooser.random() < 0.02:
                gone = chooser.choice(sorted(alive))
                core.abort_request([gone])
                alive.discard(gone)
        assert engine.used_blocks == 0
        assert engine.generate([canary]) == expected
        windows = engine.manager.coordinator.single_type_managers[1]
        assert not windows.req_to_blocks
        assert not windows._dropped
        assert not windows._shared
        assert not windows._joined
        assert not windows._last_turn
        del core, windows
