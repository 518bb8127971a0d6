"""SGLang's CPU engine with the plugin, on a tiny model, in fp32."""

import pytest

pytest.importorskip("sglang.srt.plugins")

from schedulers import engine
from serving_models import TinyModel, prompts, twenty_prompts

LENGTHS = (5, 40, 300, 700)
#: Tokens of a page: 256 for fp32 windows.
PAGE = 256
STRICT = {"strict": True}


@pytest.fixture(scope="module")
def asked():
    return prompts(*LENGTHS)


@pytest.fixture(scope="module")
def stock(tiny_model, asked):
    with engine(tiny_model) as started:
        assert "oscarkv" not in type(started.tree).__module__
        return started.generate(asked)


@pytest.fixture(scope="module")
def strict(tiny_model, asked):
    return tiny_model.oracle(asked)


def test_the_plugin_really_runs(tiny_model):
    from oscarkv.integrations.sglang.allocator import OscarAllocator
    from oscarkv.integrations.sglang.backend import OscarAttention
    from oscarkv.integrations.sglang.pool import OscarPool
    from oscarkv.integrations.sglang.tree import OscarTree

    with engine(tiny_model, {}) as started:
        runner = started.scheduler.tp_worker.model_runner
        assert isinstance(runner.attn_backend, OscarAttention)
        assert isinstance(runner.token_to_kv_pool, OscarPool)
        assert isinstance(started.allocator, OscarAllocator)
        assert isinstance(started.tree, OscarTree)
        assert started.tree.page_size == runner.token_to_kv_pool.page_size == PAGE


@pytest.mark.parametrize("chunk", [2048, PAGE])
def test_windows_that_hold_everything_give_stock_tokens(tiny_model, asked, stock, chunk):
    with engine(tiny_model, {"recent": 4096}, chunked_prefill_size=chunk) as started:
        assert started.generate(asked) == stock
        assert started.generate(asked) == stock
        assert started.cached == [0, 0, 256, 512]


def test_twenty_long_prompts(tiny_model):
    """As in vLLM (test_engine.py), so both plugins give the same tokens."""
    asked = twenty_prompts()
    with engine(tiny_model, STRICT, context_length=4096, max_total_tokens=40960) as started:
        doubts = tiny_model.doubts(asked, started.generate(asked))
    assert max(doubts) < 0.01
    assert doubts.count(0) >= 18  # the others had two tokens that near


@pytest.mark.parametrize("chunk", [2048, PAGE, 2 * PAGE])
def test_small_windows_give_the_tokens_of_oscarcache(tiny_model, asked, strict, stock, chunk):
    assert strict != stock
    with engine(tiny_model, STRICT, chunked_prefill_size=chunk) as started:
        assert started.generate(asked) == strict
        started.scheduler.flush_cache()
        assert [started.generate([prompt])[0] for prompt in asked] == strict


@pytest.mark.parametrize("recipe", ["precise", "retrieval"])
def test_other_recipes_give_the_tokens_of_oscarcache(tmp_path, asked, strict, recipe):
    model = TinyModel(tmp_path, recipe=recipe)
    expected = model.oracle(asked)
    assert expected != strict
    with engine(model, STRICT) as started:
        assert started.generate(asked) == expected


def test_layers_with_bits_of_their_own(tmp_path, asked):
    model = TinyModel(tmp_path, recipe="compact")
    uniform = model.oracle(asked)
    model.give_bits({0: (2, 4), 1: (3, 2)})
    expected = model.oracle(asked)
    assert expected != uniform
    with engine(model, STRICT, chunked_prefill_size=PAGE) as started:
        assert started.generate(asked) == expected
        assert [started.generate([prompt])[0] for prompt in asked] == expected
        pool = started.allocator.pool
        assert [(x.key_bits, x.value_bits) for x in pool.layouts] == [(2, 4), (3, 2)]
        assert [pages.shape[-1] for pages in pool.k_buffer] == [x.bytes for x in pool.layouts]


def test_without_a_radix_cache(tiny_model, asked, strict):
    with engine(tiny_model, STRICT, disable_radix_cache=True) as started:
        assert started.generate(asked) == strict
        assert started.generate(asked) == strict
        assert started.cached == [0, 0, 0, 0]
        assert started.allocator.windows.idle == 0


def test_hits_with_small_windows(tiny_model, asked, strict):
    with engine(tiny_model, STRICT, chunked_prefill_size=PAGE) as started:
        assert started.generate(asked) == strict
        assert started.generate(asked) == strict
        assert started.cached == [0, 0, 256, 512]
        # A fresh request batched with one that has a prefix in the cache.
        fresh = prompts(333, 20, seed=1)
        both = [fresh[0], asked[3], fresh[1]]
        assert started.generate(both) == tiny_model.oracle(both)
        assert started.cached == [0, 512, 0]


def test_the_next_turn_finds_the_answer_too(tiny_model):
    """Generated tokens are cached: all of a first turn but its last, unfilled page."""
    first, more = prompts(200, 60, seed=4)
    with engine(tiny_model, STRICT) as started:
        (answer,) = started.generate([first], new=400)
        second = first + answer + more
        expected = tiny_model.oracle([second])
        assert started.generate([second]) == expected
        assert started.cached == [512]
        assert started.generate([first]) == [answer[:24]]


def test_equal_prompts_at_once(tiny_model):
    """Each computes its own pages, then all but one give theirs up for the tree's."""
    (prompt,) = prompts(600, seed=5)
    (expected,) = tiny_model.oracle([prompt], 40)
    with engine(tiny_model, STRICT) as started:
        assert started.generate([prompt] * 5, new=40) == [expected] * 5
        assert started.tree.total_size() == 512
        assert started.generate([prompt], new=40) == [expected]
        assert started.cached == [512]


def test_a_shared_beginning_is_found_by_the_third(tiny_model):
    """The tree knows after the second request that it is shared, and keeps its windows."""
    head, *tails = prompts(600, 900, 900, 900, 900, seed=6)
    whole = [head[:520] + tail for tail in tails]
    expected = tiny_model.oracle(whole)
    with engine(tiny_model, STRICT) as started:
        found = []
        for prompt, answer in zip(whole, expected, strict=True):
            assert started.generate([prompt]) == [answer]
            found += started.cached
        assert found == [0, 0, 512, 512]


def test_a_hit_without_its_windows_shortens(tiny_model):
    (prompt,) = prompts(1200, seed=3)
    expected = tiny_model.oracle([prompt])
    with engine(tiny_model, STRICT, chunked_prefill_size=PAGE) as started:
        assert started.generate([prompt]) == expected
        assert started.generate([prompt]) == expected
        assert started.cached == [1024]
        drop_windows(started, prompt, 1008)  # read after 1024 tokens, not after 768
        assert started.generate([prompt]) == expected
        assert started.cached == [768]
        assert started.generate([prompt]) == expected
        assert started.cached == [1024]
        drop_windows(started, prompt, 0)  # the sink
        assert started.generate([prompt]) == expected
        assert started.cached == [0]


def drop_windows(started, prompt, position):
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, windows = started.tree, started.allocator.windows
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))
    pages = started.allocator.pages_of(tree.path_device_indices(found.last_device_node))
    unit = windows.unit(pages, position // 16)
    page = windows.page_of.pop(unit)
    windows.left.pop(unit, None)
    windows.ends.pop(unit, None)
    windows.changed.add(unit)
    started.allocator._give([page])
    started.allocator.publish()
