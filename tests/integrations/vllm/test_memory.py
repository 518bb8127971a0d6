"""Blocks: preemption, hits whose windows are gone, what a request is charged."""

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts

NEW = 220


def test_preemption_changes_nothing(tiny_model):
    asked = prompts(*[30 + 9 * i for i in range(8)], seed=2)
    expected = tiny_model.oracle(asked, NEW)
    knobs = {"num_gpu_blocks_override": 50, "max_model_len": 1024, "max_num_batched_tokens": 256}
    for caching in (False, True):
        with tiny_model.engine({"strict": True}, enable_prefix_caching=caching, **knobs) as engine:
            preempted = []
            plain = engine.scheduler._preempt_request

            def count(request, *args, plain=plain, preempted=preempted, **options):
                preempted.append(request.request_id)
                return plain(request, *args, **options)

            engine.scheduler._preempt_request = count
            assert engine.generate(asked, NEW) == expected
            assert engine.used_blocks == 0
            assert preempted, "the cache is too large to force one"
            del engine.scheduler._preempt_request, plain, count


def test_a_hit_without_its_windows_shortens(tiny_model):
    (prompt,) = prompts(700, seed=3)
    expected = tiny_model.oracle([prompt])
    with tiny_model.engine(
        {"strict": True}, enable_prefix_caching=True, max_num_batched_tokens=256
    ) as engine:
        assert engine.generate([prompt]) == expected
        assert engine.generate([prompt]) == expected
        assert engine.cached == [672]
        pool = engine.manager.block_pool
        group = 1  # the windows'
        size = 16

        def forget(first: int, last: int) -> None:
            """Evict the window blocks of positions first to last."""
            request = next(iter(hashes))
            for index in range(first // size, last // size):
                found = pool.get_cached_block(request[index], [group])
                if found:
                    pool._maybe_evict_cached_block(found[0])

        hashes = [_hashes(engine, prompt)]
        forget(640, 656)  # what a hit at 672 reads; the one at 448 has its own
        assert engine.generate([prompt]) == expected
        assert engine.cached == [448]
        assert engine.generate([prompt]) == expected
        assert engine.cached == [672]
        forget(0, 16)  # the sink
        assert engine.generate([prompt]) == expected
        assert engine.cached == [0]
        assert engine.used_blocks == 0


def _hashes(engine, prompt):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        request_id="hashes",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=engine.llm.llm_engine.engine_core.engine_core.request_block_hasher,
    )
    assert engine.manager.block_pool.hash_block_size == 16
    return request.block_hashes


def test_a_long_prompt_takes_few_window_blocks(tiny_model):
    """A chunk of 1,500 tokens: the sink and its end, not itself."""
    (prompt,) = prompts(1500, seed=4)
    with tiny_model.engine({}) as engine:
        taken = []
        manager = engine.manager.coordinator.single_type_managers[1]

        def spy(*arguments, plain=manager.allocate_new_blocks):
            blocks = plain(*arguments)
            taken.append(sum(not block.is_null for block in blocks))
            return blocks

        manager.allocate_new_blocks = spy
        engine.generate([prompt], 4)
        assert taken[0] <= 1 + (64 + 16) // 16 + 1
        del manager.allocate_new_blocks, spy


@pytest.mark.parametrize(("head_dim", "least"), [(64, 6.0), (128, 6.3)])
def test_capacity_at_32k(head_dim, least):
    """Blocks a request of 32,768 tokens is charged, against BF16's of the same bytes."""
    from types import SimpleNamespace

    import torch
    from vllm.utils.math_utils import cdiv

    from oscarkv import Recipe
    from oscarkv.integrations.vllm.settings import page_layout
    from oscarkv.integrations.vllm.windows import WindowLayer

    length, recipe = 32768, Recipe.named("uniform")
    page = page_layout(recipe, head_dim, torch.bfloat16).page_size
    layer = WindowLayer(8, head_dim, torch.bfloat16, recipe.sink, recipe.recent, page)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length), max_concurrent_batches=2
    )
    spec = layer.get_kv_cache_spec(config)
    windows = spec.max_memory_usage_bytes(config) // spec.page_size_bytes
    assert spec.page_size_bytes == 8 * 2 * 16 * head_dim * 2
    assert length / 16 / (cdiv(length, page) + windows) >= least


def test_the_reported_concurrency_decodes_without_preemption(tiny_model):
    knobs = {"num_gpu_blocks_override": 160, "max_model_len": 1024, "max_num_seqs": 32}
    with tiny_model.engine({}, **knobs) as engine:
        count = int(engine.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency)
        assert count >= 5
        preempted, running = [], []
        scheduler = engine.scheduler

        def refuse(request, *arguments, **options):
            preempted.append(request.request_id)
            raise AssertionError("preempted")

        def spy(*arguments, plain=scheduler.schedule, **options):
            made = plain(*arguments, **options)
            running.append(len(scheduler.running))
            return made

        scheduler._preempt_request, scheduler.schedule = refuse, spy
        engine.generate(prompts(*[900] * count, seed=5), 120)
        assert not preempted
        assert max(running) == count
        del scheduler._preempt_request, scheduler.schedule, spy
