"""Layers with bits of their own in vLLM's CPU engine: pages of different bytes."""

import pytest

pytest.importorskip("vllm.config")

from engines import TinyModel
from serving_models import prompts

import oscarkv
from oscarkv.integrations.vllm.windows import SUFFIX

LENGTHS = (5, 40, 300, 700)
STRICT = {"strict": True}
#: Two of four layers have pages of a second size, in which vLLM would see a pattern; one of three.
PATTERN = {1: (3, 3), 3: (2, 4)}
ONE = {1: (3, 2)}


@pytest.fixture(scope="module")
def asked():
    return prompts(*LENGTHS)


@pytest.fixture(scope="module", params=[(4, PATTERN), (3, ONE)], ids=["pattern", "one"])
def tuned(tmp_path_factory, request):
    layers, bits = request.param
    folder = tmp_path_factory.mktemp("tuned")
    model = TinyModel(folder, recipe="compact", num_hidden_layers=layers)
    model.give_bits(bits)
    return model


@pytest.fixture(scope="module")
def strict(tuned, asked):
    return tuned.oracle(asked)


@pytest.mark.parametrize("chunk", [None, 100])
def test_the_tokens_of_oscarcache(tuned, asked, strict, chunk):
    knobs = {} if chunk is None else {"max_num_batched_tokens": chunk}
    with tuned.engine(STRICT, **knobs) as engine:
        assert engine.generate(asked) == strict
        assert [engine.generate([prompt])[0] for prompt in asked] == strict
        assert engine.used_blocks == 0
        pages = {
            layer.kv_cache.shape[-1] for name, layer in engine.layers.items() if "oscar" not in name
        }
        assert len(pages) > 1


def test_prefix_hits(tuned, asked, strict):
    with tuned.engine(STRICT, enable_prefix_caching=True) as engine:
        assert engine.generate(asked) == strict
        assert engine.generate(asked) == strict
        assert engine.cached[-1] > 400


def test_memory_is_counted(tuned):
    """vLLM's own number of tokens is what `oscarkv vllm check` foretells."""
    import torch

    from oscarkv.integrations.vllm.capacity import Capacity
    from oscarkv.integrations.vllm.settings import Settings

    settings = Settings(artifact=str(tuned.artifact))
    with tuned.engine({}) as engine:
        cache = engine.manager.kv_cache_config
        memory = 1 << 30
        layers = tuned.model.config.num_hidden_layers
        heads = tuned.model.config.num_key_value_heads
        said = Capacity(layers, heads, 64, torch.float32, settings.recipe, 2048, settings.others)
        assert said.larger > 1
        assert said.blocks(memory) == cache.num_blocks
        assert len(cache.kv_cache_groups) == 2


@pytest.mark.parametrize("options", [{"skip": [0]}, {"canary": {}}, {"uniform": True}], ids=str)
def test_all_layers_alike_where_they_cannot_differ(tuned, asked, options):
    """Beside layers that keep vLLM's cache, or a canary, or by request: the recipe's bits."""
    with tuned.engine(STRICT | options) as engine:
        found = engine.generate(asked)
        pages = {
            layer.kv_cache.shape[-1]
            for name, layer in engine.layers.items()
            if name + SUFFIX in engine.layers
        }
        assert len(pages) == 1
    if "skip" not in options:
        alike = oscarkv.load_artifact(tuned.artifact).with_bits({})
        assert found == tuned.oracle(asked, artifact=alike)
