"""KV offload: blocks that leave the cache lie in the host's memory, and come back from there.

vLLM's connector copies with CUDA; here its copies are made by torch, at once.
"""

import types

import pytest

pytest.importorskip("vllm.config")

import torch
from serving_models import prompts

GIB = 1 << 30


class Copies:
    """Stands in for `DmaCopyBackend`."""

    def init(self, device_caches, host_caches, *_):
        self.device, self.host = device_caches, host_caches

    def launch_copy(self, source, target, is_store, event_idx, events_list, wait_event=None):
        for name, device in self.device.items():
            there, back = (device, self.host[name]), (self.host[name], device)
            read, written = there if is_store else back
            written[target] = read[source]
        events_list.append((event_idx, types.SimpleNamespace(query=lambda: True)))


class Nothing:
    """Streams and events."""

    def __init__(self, **_):
        pass

    @staticmethod
    def priority_range():
        return 0, 0

    def record(self, *_):
        pass


@pytest.fixture
def offload(monkeypatch):
    from vllm.v1.simple_kv_offload import worker

    monkeypatch.setattr(worker, "DmaCopyBackend", Copies)
    monkeypatch.setattr(worker, "PIN_MEMORY", False)
    plain = worker.SimpleCPUOffloadWorker.register_kv_caches

    def register(self, caches):  # vLLM's CPU worker has put its own streams there meanwhile
        monkeypatch.setattr(torch.cuda, "Stream", Nothing)
        monkeypatch.setattr(torch.cuda, "current_stream", Nothing)
        monkeypatch.setattr(torch, "Event", Nothing)
        plain(self, caches)

    monkeypatch.setattr(worker.SimpleCPUOffloadWorker, "register_kv_caches", register)
    extra = {"cpu_bytes_to_use": GIB // 4}
    return {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def test_evicted_prompts_come_back(tiny_model, offload):
    """A small cache, in which every prompt drives out the ones before."""
    system = prompts(500, seed=1)[0]
    # Prompts without near-ties: with seed 2, two answers part from OscarCache's in an engine
    # without offload as well, the first where the best two tokens are 0.01 apart.
    asked = [system + rest for rest in prompts(700, 900, 650, 800, 1000, seed=5)]
    longer = [prompt + rest for prompt, rest in zip(asked, prompts(*[130] * 5), strict=True)]
    everything = [*asked, *longer]
    expected = tiny_model.oracle(everything)
    with tiny_model.engine(
        {"strict": True},
        kv_transfer_config=offload,
        enable_prefix_caching=True,
        num_gpu_blocks_override=80,
        max_num_seqs=2,
    ) as engine:
        manager = engine.scheduler.connector.scheduler_manager
        loads: list[tuple[int, int]] = []

        def spy(request, blocks, tokens, plain=manager.update_state_after_alloc):
            if tokens:
                loads.append((request.num_tokens, tokens))
            return plain(request, blocks, tokens)

        manager.update_state_after_alloc = spy
        for _ in range(2):
            made = [engine.generate([prompt])[0] for prompt in everything]
            assert made == expected
        assert engine.generate(everything) == expected
        assert len(loads) >= 5, loads
        # Some prompts were found in part on the device, and in part in the host's memory.
        assert any(tokens < length - 224 for length, tokens in loads), loads
        assert engine.used_blocks == 0
        del manager.update_state_after_alloc, spy, manager


def test_a_load_leaves_nothing_behind_that_was_never_filled(tiny_model, offload):
    """What a prompt brings back is for its own end; a shorter prefix of it must not be found with
    windows that nothing was put in."""
    whole, *others = prompts(1300, 1200, 1250, 1280, seed=3)
    shorter = whole[:1000] + prompts(60, seed=4)[0]
    expected = tiny_model.oracle([whole, shorter])
    with tiny_model.engine(
        {"strict": True},
        kv_transfer_config=offload,
        enable_prefix_caching=True,
        num_gpu_blocks_override=80,
        max_num_seqs=1,
    ) as engine:
        for prompt in (whole, *others):
            engine.generate([prompt])
        pool = engine.manager.block_pool
        for block in pool.blocks[1:]:  # as if everything had been used for something else
            pool._maybe_evict_cached_block(block)
        fill(engine)
        assert engine.generate([whole]) == expected[:1]
        assert engine.generate([shorter]) == expected[1:]


def fill(engine) -> None:
    """Other numbers in every block of the cache."""
    for layer in engine.layers.values():
        cache = layer.kv_cache
        cache.copy_(torch.full_like(cache, 3))
