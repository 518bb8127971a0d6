"""Codes of single tokens are written several steps at once; nothing may tell."""

import copy
from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import Artifact, OscarCache, Recipe

WINDOWS = {"sink": 4, "recent": 32}


@pytest.fixture(scope="module")
def attached() -> tuple[Any, Artifact]:
    model = tiny.model()
    return model, tiny.quick_calibrate(model, Recipe.named("uniform", **WINDOWS))


def make(attached: tuple[Any, Artifact], held: bool) -> OscarCache:
    cache = OscarCache(*attached, page_size=16)
    cache.backend.write_batch = 16 if held else 1
    return cache


def history(cache: OscarCache) -> list[torch.Tensor]:
    """The packed bytes of every sequence, in order, whatever pages hold them."""
    step = cache.pages.append([0] * len(cache.pages.lengths))
    return [layer.history[step.history_table.long()] for layer in cache.pages.layers]


def assert_same(found: OscarCache, expected: OscarCache) -> None:
    for cache in (found, expected):
        cache._pack_held()
    assert found.pages.lengths == expected.pages.lengths
    for ours, theirs in zip(history(found), history(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("steps", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_logits_and_bytes(attached: tuple[Any, Artifact], steps: int, batch: int) -> None:
    model, _ = attached
    ids = tiny.tokens(batch, 40 + steps)
    held, direct = make(attached, True), make(attached, False)
    outputs = [tiny.decode_logits(model, ids, cache, 40) for cache in (held, direct)]
    assert torch.equal(outputs[0], outputs[1])
    assert_same(held, direct)


@pytest.mark.parametrize("steps", [5, 20])
def test_crops_and_reorders_find_whole_pages(attached: tuple[Any, Artifact], steps: int) -> None:
    model, _ = attached
    caches = make(attached, True), make(attached, False)
    ids = tiny.tokens(2, 45 + steps)
    more = tiny.tokens(3, 80, seed=1)
    outputs = []
    for cache in caches:
        tiny.decode_logits(model, ids, cache, 45)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        # A long chunk reads what was just decoded from its codes.
        outputs.append(tiny.logits(model, more[:, :70], cache))
        outputs[-1] = torch.cat([outputs[-1], tiny.decode_logits(model, more[:, 70:], cache, 1)], 1)
    assert torch.equal(outputs[0], outputs[1])
    assert_same(*caches)


def test_held_tokens_are_counted_and_forgotten(attached: tuple[Any, Artifact]) -> None:
    model, _ = attached
    cache = make(attached, True)
    ids = tiny.tokens(1, 45)
    tiny.decode_logits(model, ids, cache, 40)
    identity = attached[1].model
    held = 5 * 2 * identity.layers * identity.kv_heads * identity.head_dim * 4
    assert cache.nbytes() == cache.pages.nbytes() + held
    cache.reset()
    assert cache.nbytes() == cache.pages.nbytes()
    again = tiny.decode_logits(model, ids, cache, 40)
    assert torch.equal(again, tiny.decode_logits(model, ids, make(attached, False), 40))


def test_short_windows_are_not_held_back() -> None:
    model = tiny.model()
    cache = OscarCache(model, tiny.calibrated())
    assert cache.recipe.recent < 2 * cache.backend.write_batch
    assert not cache.holds_back(1)


def test_a_deep_copy_goes_its_own_way(attached: tuple[Any, Artifact]) -> None:
    """How Transformers users share a prompt's cache between chats."""
    model, _ = attached
    ids = tiny.tokens(1, 90)
    cache = make(attached, True)
    tiny.decode_logits(model, ids[:, :60], cache, 50)
    other = copy.deepcopy(cache)
    first = tiny.decode_logits(model, ids[:, 60:], cache, 1)
    assert torch.equal(tiny.decode_logits(model, ids[:, 60:], other, 1), first)
    assert_same(other, cache)
