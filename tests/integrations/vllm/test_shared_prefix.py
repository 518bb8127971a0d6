"""Prefix hits by vLLM's own count, where requests share a part of their prompts.

Pages hold 224 tokens here (fp32 windows), windows 16 + 64.
"""

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts

PAGE = 224
SYSTEM = 700
CHUNKS = pytest.mark.parametrize("chunk", [None, 100, 512], ids=["whole", "100", "512"])


def last_page(tokens):
    return tokens // PAGE * PAGE


@pytest.fixture
def caching(tiny_model):
    def engine(chunk=None, **knobs):
        if chunk is not None:
            knobs["max_num_batched_tokens"] = chunk
        return tiny_model.engine({"strict": True}, enable_prefix_caching=True, **knobs)

    return engine


@pytest.fixture
def undisturbed(tiny_model):
    def answers(asked):
        """Of an engine that shares nothing."""
        with tiny_model.engine({"strict": True}) as engine:
            return engine.generate(asked)

    return answers


def one_by_one(engine, asked, new=24):
    """Answers, and how many tokens of each prompt were found."""
    made, cached = [], []
    for prompt in asked:
        made += engine.generate([prompt], new)
        cached += engine.cached
    assert engine.used_blocks == 0
    return made, cached


@CHUNKS
def test_the_third_of_a_kind_hits_whatever_follows(undisturbed, caching, chunk):
    """The second shows vLLM where the shared part ends, and keeps its windows."""
    (system,) = prompts(SYSTEM, seed=20)
    asked = [system + own for own in prompts(500, 430, 600, 500, seed=21)]
    with caching(chunk) as engine:
        made, cached = one_by_one(engine, asked)
    assert made == undisturbed(asked)
    assert cached[0] == 0
    assert cached[2:] == [last_page(SYSTEM)] * 2


@CHUNKS
def test_the_second_hits_behind_a_short_turn(undisturbed, caching, chunk):
    (system,) = prompts(SYSTEM, seed=22)
    asked = [system + own for own in prompts(250, 40, 500, seed=23)]
    with caching(chunk) as engine:
        made, cached = one_by_one(engine, asked)
    assert made == undisturbed(asked)
    assert cached == [0, last_page(SYSTEM), last_page(SYSTEM)]


@CHUNKS
def test_requests_that_arrive_together_share(undisturbed, caching, chunk):
    """The first two may both read the whole prompt; the others find it while those run."""
    (system,) = prompts(SYSTEM, seed=24)
    asked = [system + own for own in prompts(300, 400, 350, 500, 310, seed=25)]
    with caching(chunk) as engine:
        made = engine.generate(asked)
        assert engine.cached[2:] == [last_page(SYSTEM)] * 3
        assert engine.used_blocks == 0
    assert made == undisturbed(asked)


def test_a_prefix_within_a_prefix(undisturbed, caching):
    """Examples behind a system prompt that others use without them."""
    (system, examples) = prompts(SYSTEM, 500, seed=26)
    owns = prompts(*[300] * 7, seed=27)
    alone = [system + own for own in owns[:3]]
    longer = [system + examples + own for own in owns[3:]]
    with caching() as engine:
        made, cached = one_by_one(engine, alone + longer)
    assert made == undisturbed(alone + longer)
    outer, inner = last_page(SYSTEM), last_page(SYSTEM + 500)
    assert cached[2:4] == [outer, outer]
    assert cached[5:] == [inner, inner]


@CHUNKS
def test_every_turn_of_a_chat_hits_the_one_before(undisturbed, caching, chunk):
    """Answers are found again, too: up to the last whole page of prompt and answer."""
    (first, *later) = prompts(300, 60, 400, 10, seed=28)
    talk, new, known = first, 200, 0
    asked, answers = [], []
    with caching(chunk) as engine:
        for more in [*later, []]:
            (answer,), cached = one_by_one(engine, [talk], new)
            assert cached == [last_page(known)]
            asked, answers = [*asked, talk], [*answers, answer[:24]]
            known = len(talk) + new - 1  # nothing read the last token
            talk = talk + answer + more
    assert answers == undisturbed(asked)


def test_two_continuations_of_a_chat(undisturbed, caching):
    (first, one, other) = prompts(500, 90, 400, seed=29)
    with caching() as engine:
        (answer,), _ = one_by_one(engine, [first], 250)
        talk = first + answer
        asked = [talk + one, talk + other, first + other, first + one]
        made, cached = one_by_one(engine, asked)
    assert made == undisturbed(asked)
    # The last two leave the first turn at its end, before the answer.
    assert cached == [last_page(749)] * 2 + [last_page(500)] * 2


def test_windows_that_were_evicted_come_back(undisturbed, caching):
    """A hit that had to be shorter makes the next one long again."""
    (system,) = prompts(SYSTEM, seed=30)
    asked = [system + own for own in prompts(300, 400, 350, 500, 310, seed=31)]
    with caching() as engine:
        _, cached = one_by_one(engine, asked[:3])
        assert cached[2] == last_page(SYSTEM)
        pool = engine.manager.block_pool
        for block in pool.blocks:  # every window, and no page
            if block.block_hash is not None and block.block_hash[-4:] == (1).to_bytes(4, "big"):
                pool._maybe_evict_cached_block(block)
        made, cached = one_by_one(engine, asked[3:])
        assert cached == [0, last_page(SYSTEM)]
        del pool, block
    assert made == undisturbed(asked[3:])
