"""How much an OscarCache says it holds, and how much it really holds."""

import ctypes
import gc
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from integrations import tiny

from oscarkv import Artifact, OscarCache, Recipe
from oscarkv.artifact import reader_of
from oscarkv.integrations.transformers.calibrate import data_free
from oscarkv.integrations.transformers.geometry import describe


def live_bytes() -> int:
    """Storage of all tensors alive, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def smollm2_shaped(layers: int = 2, **knobs: Any) -> tuple[Any, Artifact]:
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    shape |= {"num_hidden_layers": layers, "max_position_embeddings": 16384}
    model = tiny.model(**shape, **knobs)
    artifact = data_free(describe(model), range(layers), Recipe.named("quarot-int2"))
    # The default recipe's storage with transforms that need no text: memory is all that counts.
    for layer in artifact.layers.values():
        layer.query = reader_of(layer.key, Recipe())
    return model, Artifact(artifact.model, Recipe(), artifact.layers)


@torch.no_grad()
def feed(model: Any, cache: OscarCache, length: int, chunk: int = 1024) -> None:
    for start in range(0, length, chunk):
        model.model(input_ids=tiny.tokens(1, chunk, seed=start), past_key_values=cache)


@pytest.mark.parametrize("chunk", [8192, 1024, 512])
def test_8192_tokens_take_three_bits(chunk: int) -> None:
    model, artifact = smollm2_shaped(1, dtype=torch.bfloat16)
    cache = OscarCache(model, artifact)
    feed(model, cache, 8192, chunk)
    assert cache.pages.layers[0].window.dtype == torch.bfloat16
    print(f"\n8192 tokens in chunks of {chunk}: {cache.bits_per_element():.3f} bits an element")
    assert cache.bits_per_element() == cache.bits_per_element(2) <= 3.0
    # No less than what must be there: codes, parameters and the windows.
    assert cache.bits_per_element() >= artifact.recipe.bits(64, 8192)
    elements = 2 * 3 * 64 * 8192
    assert 8 * cache.nbytes() / elements == pytest.approx(cache.bits_per_element())


def test_nbytes_is_what_tensors_hold() -> None:
    model, artifact = smollm2_shaped()
    cache = OscarCache(model, artifact)
    feed(model, cache, 64, 64)  # constants that are made on first use
    small, before = cache.nbytes(), live_bytes()
    feed(model, cache, 4096 - 64, 63 * 64)
    cache.backend.plan(*(torch.zeros(n, dtype=torch.int32) for n in (0, 1, 0, 0)))
    cache._step = None  # the last step's tables belong to the step
    grown = live_bytes() - before
    # Tables on the device have some columns to spare, within the tolerance below.
    sequence = cache.pages._sequences[0]
    tables = 4 * (len(sequence.history) + len(sequence.windows))
    small_tables = 4 * (1 + 4)
    assert cache.nbytes() - tables - (small - small_tables) == pytest.approx(grown, abs=4096)


@pytest.mark.parametrize("length", [100, 1000])
def test_stock_layers_count_what_they_hold(length: int) -> None:
    """A sliding layer shows its window, but after a prompt it still holds all of it."""
    model, artifact = tiny.model("gemma3"), tiny.calibrated("gemma3")
    cache = OscarCache(model, artifact)
    before = live_bytes()
    tiny.logits(model, tiny.tokens(1, length), cache)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in (cache.layers[0], cache.layers[2])
        for tensor in (layer.keys, layer.values)
    }
    assert cache.nbytes() - cache.pages.nbytes() == pytest.approx(sum(held.values()), abs=64)
    assert live_bytes() - before >= sum(held.values())


def resident() -> int:
    """Bytes of this process in use: what was freed goes back to the system first."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def test_the_process_grows_by_nbytes_and_no_more() -> None:
    """Nothing keeps a full-precision copy: that would be 100 MB here."""
    model, artifact = smollm2_shaped(2)
    artifact = Artifact(
        artifact.model, artifact.recipe.replace(sink=16, recent=16), artifact.layers
    )
    cache = OscarCache(model, artifact, page_size=256)
    cache.pages.add(1)
    store = cache.pages.layers
    k = torch.randn(2048, 3, 64)
    before = 0
    for round_number in range(32):  # 65536 tokens straight into the pages
        if round_number == 2:  # temporaries have been allocated by now
            before = resident()
        step = cache.pages.append([2048])
        for layer in store:
            cache.backend.write(k, k, step.history_slots, step.window_slots, layer)
    grown = resident() - before
    full = 2 * 2 * 3 * 64 * 65536 * 4
    assert cache.nbytes() < full / 10
    assert grown < 2 * cache.nbytes() + 20e6 < full / 3  # growing copies the pools


def test_memory_comes_back() -> None:
    model, artifact = smollm2_shaped()
    cache = OscarCache(model, artifact)
    feed(model, cache, 2048)
    held = cache.nbytes()
    cache.reset()
    feed(model, cache, 2048)
    assert cache.nbytes() == held
    before = live_bytes()
    pools = sum(layer.history.nbytes + layer.window.nbytes for layer in cache.pages.layers)
    del cache
    assert before - live_bytes() >= pools
