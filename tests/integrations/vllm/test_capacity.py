"""The arithmetic of `oscarkv vllm check` is the engine's own."""

import pytest

pytest.importorskip("vllm.config")

import torch

from oscarkv.integrations.vllm.capacity import Capacity
from oscarkv.integrations.vllm.settings import Settings

BLOCKS = 300


@pytest.mark.parametrize("length", [500, 2048])
def test_tokens_are_those_the_engine_reports(tiny_model, length):
    settings = Settings(artifact=str(tiny_model.artifact), recent=128)
    capacity = Capacity(2, 2, 64, torch.float32, settings.recipe, length)
    memory = BLOCKS * capacity.block_bytes + 17
    knobs = {"max_model_len": length, "num_gpu_blocks_override": BLOCKS}
    with tiny_model.engine({"recent": 128}, **knobs) as engine:
        cache = engine.llm.llm_engine.vllm_config.cache_config
        assert cache.num_gpu_blocks == capacity.blocks(memory)
        assert cache.kv_cache_size_tokens == capacity.tokens(memory)
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        held = sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups)
        assert held == 2 * capacity.block_bytes  # a block of each group
