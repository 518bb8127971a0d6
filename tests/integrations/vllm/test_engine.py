"""vLLM's CPU engine with the plugin, on a tiny model, in fp32."""

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts, twenty_prompts

LENGTHS = (5, 40, 300, 700)
STRICT = {"strict": True}


@pytest.fixture(scope="module")
def asked():
    return prompts(*LENGTHS)


@pytest.fixture(scope="module")
def stock(tiny_model, asked):
    with tiny_model.engine() as engine:
        assert not [name for name in engine.layers if "oscarkv" in name]
        return engine.generate(asked)


@pytest.fixture(scope="module")
def strict(tiny_model, asked):
    return tiny_model.oracle(asked)


def test_the_plugin_really_runs(tiny_model):
    with tiny_model.engine({}) as engine:
        from oscarkv.integrations.vllm.backend import OscarBackend
        from oscarkv.integrations.vllm.impl import OscarImpl

        attention = {n: x for n, x in engine.layers.items() if "oscarkv" not in n}
        assert attention
        for name, layer in attention.items():
            assert layer.attn_backend is OscarBackend
            assert isinstance(layer.impl, OscarImpl)
            assert f"{name}.oscarkv_windows" in engine.layers
        history, windows = engine.manager.kv_cache_config.kv_cache_groups
        assert history.kv_cache_spec.page_size_bytes == windows.kv_cache_spec.page_size_bytes
        assert history.kv_cache_spec.block_size == 224  # fp32 windows


def test_disabled_is_stock(tiny_model, asked, stock):
    with tiny_model.engine({"enabled": False}) as engine:
        assert not [name for name in engine.layers if "oscarkv" in name]
        assert engine.generate(asked) == stock


@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 64}], ids=["whole", "chunks"])
def test_windows_that_hold_everything_give_stock_tokens(tiny_model, asked, stock, knobs):
    with tiny_model.engine({"recent": 4096}, **knobs) as engine:
        assert engine.generate(asked) == stock
        assert engine.used_blocks == 0


def test_twenty_long_prompts(tiny_model):
    """As in SGLang (test_sglang_engine.py), so both plugins give the same tokens."""
    asked = twenty_prompts()
    with tiny_model.engine(STRICT, max_model_len=4096) as engine:
        doubts = tiny_model.doubts(asked, engine.generate(asked))
    assert max(doubts) < 0.01
    assert doubts.count(0) >= 18  # the others had two tokens that near


def test_exact_with_prefix_hits(tiny_model, asked, stock):
    with tiny_model.engine({"recent": 4096}, enable_prefix_caching=True) as engine:
        assert engine.generate(asked) == stock
        assert engine.generate(asked) == stock
        assert engine.cached == [0, 0, 224, 672]


@pytest.mark.parametrize("chunk", [None, 64, 100, 512])
def test_small_windows_give_the_tokens_of_oscarcache(tiny_model, asked, strict, stock, chunk):
    assert strict != stock
    knobs = {} if chunk is None else {"max_num_batched_tokens": chunk}
    with tiny_model.engine(STRICT, **knobs) as engine:
        assert engine.generate(asked) == strict
        assert [engine.generate([prompt])[0] for prompt in asked] == strict
        assert engine.used_blocks == 0


@pytest.mark.parametrize("recipe", ["precise", "retrieval"])
def test_other_recipes_give_the_tokens_of_oscarcache(tmp_path, asked, strict, recipe):
    from engines import TinyModel

    model = TinyModel(tmp_path, recipe=recipe)
    expected = model.oracle(asked)
    assert expected != strict
    with model.engine(STRICT, max_num_batched_tokens=100) as engine:
        assert engine.generate(asked) == expected


@pytest.mark.parametrize("chunk", [None, 100])
def test_prefix_hits_with_small_windows(tiny_model, asked, strict, chunk):
    knobs = {} if chunk is None else {"max_num_batched_tokens": chunk}
    with tiny_model.engine(STRICT, enable_prefix_caching=True, **knobs) as engine:
        assert engine.generate(asked) == strict
        assert engine.generate(asked) == strict
        assert engine.cached == [0, 0, 224, 672]
        # A fresh request batched with one that has a prefix in the cache.
        fresh = prompts(333, 20, seed=1)
        both = [fresh[0], asked[3], fresh[1]]
        assert engine.generate(both) == tiny_model.oracle(both)
        assert engine.cached == [0, 672, 0]
        assert engine.used_blocks == 0
