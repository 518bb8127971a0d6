"""Pages: what SGLang counts, what really fits, retraction, and what is left behind."""

import random

import pytest

pytest.importorskip("sglang.srt.plugins")

import torch
from schedulers import engine
from serving_models import TinyModel, prompts

from oscarkv import Recipe
from oscarkv.integrations.sglang.capacity import Capacity

STRICT = {"strict": True}


def require_clean(started):
    """No request is there any more, and every page is accounted for."""
    allocator, windows = started.allocator, started.allocator.windows
    assert not windows.requests
    assert not windows.holders
    assert windows.held == 0
    assert allocator.verify_byte_accounting() == []
    cached = started.tree.total_size() // allocator.page_size
    used = cached + len(windows.page_of)
    assert used + len(allocator._free) == allocator.num_pages
    assert len(set(allocator._free)) == len(allocator._free)
    assert allocator.available_size() + started.tree.evictable_size() == allocator.size
    allocator.publish()
    owners = torch.zeros_like(allocator.pool.window_of)
    for unit, page in windows.page_of.items():
        owners[unit] = page
    assert torch.equal(owners, allocator.pool.window_of)
    assert list(reversed(allocator._free)) == allocator.free_pages.tolist()


OVERLAPPED = {"disable_overlap_schedule": False}


def retract_every(steps, monkeypatch):
    """SGLang does so of itself when it is tested."""
    from sglang.srt.managers import scheduler

    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", steps)


@pytest.mark.parametrize(
    "knobs",
    [{}, {"disable_radix_cache": True}, OVERLAPPED],
    ids=["radix", "plain", "overlapped"],
)
def test_retraction_changes_nothing(tiny_model, monkeypatch, knobs):
    asked = prompts(*[30 + 70 * i for i in range(8)], seed=2)
    with engine(tiny_model, STRICT) as undisturbed:
        expected = undisturbed.generate(asked, 60)
    retract_every(12, monkeypatch)
    with engine(tiny_model, STRICT, **knobs) as started:
        names = [started.submit(prompt, 60) for prompt in asked]
        started.drain()
        requests = [started.finished[name] for name in names]
        assert [list(request.output_ids) for request in requests] == expected
        assert sum(request.retraction_count for request in requests) > 3
        require_clean(started)


def test_retraction_for_want_of_pages(tiny_model, monkeypatch):
    """Admission is made to overlook new tokens, so that requests grow out of the pool, each by
    pages and by windows."""
    from sglang.srt.managers import schedule_policy

    from oscarkv.integrations.sglang import allocator

    asked = prompts(*[20 + 9 * i for i in range(8)], seed=2)
    with engine(tiny_model, STRICT) as undisturbed:
        expected = undisturbed.generate(asked, 220)
    monkeypatch.setattr(schedule_policy, "CLIP_MAX_NEW_TOKENS", 1)
    monkeypatch.setattr(allocator, "FUTURE", 1)
    with engine(tiny_model, STRICT, max_total_tokens=8 * 256, context_length=1024) as started:
        names = [started.submit(prompt, 220) for prompt in asked]
        started.drain()
        requests = [started.finished[name] for name in names]
        assert [list(request.output_ids) for request in requests] == expected
        assert sum(request.retraction_count for request in requests) > 0
        require_clean(started)


def test_a_long_prompt_in_a_full_pool(tiny_model):
    """Read in chunks while others come and go: it never waits with its pages in hand while they
    are let in, which would cost it a token (see `WindowBudget.available_chunk_tokens`)."""
    asked = prompts(150, 90, 1900, 120, 180, 60, 200, 140, seed=4)
    with engine(tiny_model, STRICT, disable_radix_cache=True) as undisturbed:
        expected = undisturbed.generate(asked, 30)
    waited = 0
    for pages in range(8, 14):
        knobs = {"max_total_tokens": pages * 256, "context_length": 2000}
        with engine(tiny_model, STRICT, chunked_prefill_size=256, **knobs) as started:
            names = [started.submit(prompt, 30) for prompt in asked]
            running = [started.step() and len(started.allocator.windows.requests) for _ in range(9)]
            started.drain()
            made = [list(started.finished[name].output_ids) for name in names]
            assert made == expected
            require_clean(started)
            waited += max(running) < len(asked)
    assert waited  # pools in which not all of them fit at once


@pytest.mark.parametrize(
    ("count", "more"), [(500, {}), (150, OVERLAPPED)], ids=["one after another", "overlapped"]
)
def test_random_requests_leave_nothing_behind(tiny_model, monkeypatch, count, more):
    """Prefixes shared, some aborted or retracted; a canary gets the same answer all along."""
    retract_every(20, monkeypatch)
    chooser = random.Random(7)
    (canary,) = prompts(500, seed=8)
    shared = prompts(300, 650, seed=9)
    knobs = {"max_total_tokens": 24 * 256, "context_length": 1024, "chunked_prefill_size": 512}
    with engine(tiny_model, STRICT, **knobs, **more) as started:
        (expected,) = started.generate([canary])
        assert expected == tiny_model.oracle([canary])[0]
        waiting, alive = count, set()
        hits, retracted, aborted = 0, 0, 0
        while waiting or alive:
            if waiting and len(alive) < 12 and chooser.random() < 0.6:
                name = f"canary-{waiting}" if waiting % 20 == 5 else f"request-{waiting}"
                prompt = prompts(chooser.randint(1, 250), seed=1000 + waiting)[0]
                if chooser.random() < 0.5:
                    whole = chooser.choice(shared)
                    prompt = whole[: chooser.randint(1, len(whole))] + prompt
                if name.startswith("canary"):
                    started.submit(canary, 24, name)
                else:
                    started.submit(prompt, chooser.randint(1, 40), name)
                alive.add(name)
                waiting -= 1
            started.step()
            for name, request in list(started.finished.items()):
                del started.finished[name]
                alive.discard(name)
                hits += request.cached_tokens
                retracted += request.retraction_count
                if name.startswith("canary"):
                    assert list(request.output_ids) == expected
            if alive and chooser.random() < 0.04:
                gone = chooser.choice(sorted(alive))
                if not gone.startswith("canary"):
                    started.abort(gone)
                    alive.discard(gone)
                    aborted += 1
        started.drain()
        assert hits > 20 * count
        assert min(retracted, aborted) > count / 20
        require_clean(started)
        assert started.generate([canary]) == [expected]
        assert started.scheduler.flush_cache()
        assert started.allocator.free_count == started.allocator.num_pages


# -- capacity --------------------------------------------------------------------------------------

#: Memory for the caches of this test.
BYTES = 24 << 20
LENGTH = 32768


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """head_dim 128, one layer and one KV head, so that long contexts are cheap."""
    return TinyModel(
        tmp_path_factory.mktemp("wide"),
        head_dim=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )


@pytest.fixture
def memory(monkeypatch):
    """SGLang sizes its pools by what a machine has free; here that is so much."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    def available(self, before):
        return BYTES

    monkeypatch.setattr(KVCacheConfigurator, "_profile_available_bytes", available)


def test_capacity_and_filling_it(wide_model, memory):
    """SGLang counts at least 6.3 times the tokens of bf16, and as many requests of the longest
    length as that makes run at once, without a retraction, in no more memory."""
    knobs = {"dtype": "bfloat16", "context_length": LENGTH, "max_total_tokens": None,
             "chunked_prefill_size": 8192, "max_prefill_tokens": LENGTH,
             "disable_radix_cache": True}  # fmt: skip
    with engine(wide_model, **knobs) as plain:
        stock = plain.scheduler.max_total_num_tokens
    windows = {"sink": 64, "recent": 256}
    with engine(wide_model, windows, max_running_requests=64, **knobs) as started:
        ours = started.scheduler.max_total_num_tokens
        assert ours >= 6.3 * stock
        recipe = Recipe.named("uniform", **windows)
        said = Capacity(1, 1, 128, torch.bfloat16, recipe, LENGTH)  # as oscarkv sglang check
        assert (said.tokens(BYTES), said.plain_tokens(BYTES)) == (ours, stock)
        pool = started.allocator.pool
        assert sum(pages[1:].nbytes for pages in pool.k_buffer) <= BYTES  # page 0 as in any pool
        count, new = ours // LENGTH, 8
        assert count > 6 * (stock // LENGTH) >= 6
        chooser = random.Random(3)
        prompt = [chooser.randrange(3, 259) for _ in range(LENGTH - new - 2)]
        fake_prefill(started)
        for index in range(count):
            started.submit(prompt[index:] + prompt[:index], new, f"long-{index}")
        most = 0
        while len(started.finished) < count:
            started.step()
            most = max(most, len(started.scheduler.running_batch.reqs))
        assert most == count
        assert sum(r.retraction_count for r in started.finished.values()) == 0
        started.drain()
        require_clean(started)


def fake_prefill(started):
    """Attention over 32,768 tokens a dozen times takes minutes, and is not what this is about."""
    backend = started.scheduler.tp_worker.model_runner.attn_backend
    backend.prefilling.prefill = lambda q, k, v, layer, out: out.zero_()
    backend.writing.write = lambda *_: None
