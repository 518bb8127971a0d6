"""OscarCache with windows that hold everything: whatever generate() does, the stock cache's tokens.

Also what a cache refuses, and what becomes of a model that is attached.
"""

import copy
from typing import Any

import pytest
import torch
from integrations import tiny
from transformers import DynamicCache, StaticCache

from oscarkv import Artifact, OscarCache
from oscarkv.errors import CacheError


def large() -> Artifact:
    return tiny.calibrated(windows="large")


def padded(batch: int = 3, length: int = 30) -> dict[str, torch.Tensor]:
    ids = tiny.tokens(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 5 * row] = 0
    return {"ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 20},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.3},
    ],
    ids=["greedy", "beams", "beams-returned", "sampled", "sampled-twice", "penalty"],
)
def test_generates_what_the_stock_cache_does(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, inputs = tiny.model(dtype=dtype), padded()
    torch.manual_seed(5)
    expected = tiny.greedy(model, **inputs, **options)
    cache = OscarCache(model, large())
    torch.manual_seed(5)
    assert torch.equal(tiny.greedy(model, **inputs, **options, past_key_values=cache), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chat_goes_on_with_the_same_cache(dtype: torch.dtype) -> None:
    model, inputs = tiny.model(dtype=dtype), padded()
    caches = DynamicCache(config=model.config), OscarCache(model, large())
    results = []
    for cache in caches:
        ids, mask = inputs["ids"], inputs["attention_mask"]
        for turn in range(3):
            ids = tiny.greedy(model, ids, attention_mask=mask, past_key_values=cache)
            ids = torch.cat([ids, tiny.tokens(3, 6, seed=turn)], 1)
            mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], 1)
        results.append(ids)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_assisted_decoding(kind: str) -> None:
    model = tiny.model()
    ids = tiny.tokenizer()(tiny.text(60), return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if kind == "assistant":  # nearly the same model: some of its guesses are right
        assistant = tiny.model()
        with torch.no_grad():
            assistant.lm_head.weight.add_(torch.randn_like(assistant.lm_head.weight) * 0.05)
        options = {"assistant_model": assistant}
    expected = tiny.greedy(model, ids, 24)
    cache = OscarCache(model, large())
    out = tiny.greedy(model, ids, 24, past_key_values=cache, **options)
    assert torch.equal(out, expected)
    assert cache.get_seq_length() == cache.pages.lengths[0]


def test_assisted_decoding_with_stock_sliding_layers() -> None:
    model, artifact = tiny.model("gemma3"), tiny.calibrated("gemma3", windows="large")
    ids = tiny.tokenizer()(tiny.text(60), return_tensors="pt")["input_ids"]
    cache = OscarCache(model, artifact)
    out = tiny.greedy(model, ids, 24, past_key_values=cache, prompt_lookup_num_tokens=4)
    assert torch.equal(out, tiny.greedy(model, ids, 24))


def test_prompts_in_chunks() -> None:
    model, inputs = tiny.model(), padded()
    cache = OscarCache(model, large())
    # The third sequence's first chunk is padding only.
    out = tiny.greedy(model, **inputs, past_key_values=cache, prefill_chunk_size=8)
    assert cache.padding == [0, 5, 10]
    assert torch.equal(out, tiny.greedy(model, **inputs))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_reset_and_reuse(name: str) -> None:
    """Also for layers with a stock cache, whose own reset() keeps their length."""
    model = tiny.model(name)
    whole = tiny.calibrated(name, windows="large")
    artifact = Artifact(whole.model, whole.recipe, {1: whole.layers[1]})
    cache = OscarCache(model, artifact)
    tiny.greedy(model, **padded(), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = tiny.tokens(2, 33, seed=3)
    assert torch.equal(tiny.greedy(model, ids, past_key_values=cache), tiny.greedy(model, ids))


def test_copies_are_independent() -> None:
    """A prompt's cache is copied for each of its continuations."""
    model, ids = tiny.model(), tiny.tokens(1, 30)
    prompt = OscarCache(model, large())
    tiny.logits(model, ids[:, :20], prompt)
    for seed in (1, 2):
        full = torch.cat([ids, tiny.tokens(1, 5, seed=seed)], 1)
        out = tiny.greedy(model, full, past_key_values=copy.deepcopy(prompt))
        assert torch.equal(out, tiny.greedy(model, full))
    assert prompt.pages.lengths == [20]


@pytest.mark.parametrize("pick", [[2, 0], [1, 1, 1, 0], [False, True, True]])
def test_selecting_sequences(pick: list[int]) -> None:
    model, inputs = tiny.model(), padded()
    indices = torch.tensor(pick)
    outs = []
    for cache in (DynamicCache(config=model.config), OscarCache(model, large())):
        mask = inputs["attention_mask"]
        tiny.logits(model, inputs["ids"], cache, attention_mask=mask)
        cache.batch_select_indices(indices)
        mask = torch.cat([mask[indices], mask.new_ones(len(mask[indices]), 1)], 1)
        outs.append(tiny.logits(model, mask[:, -1:] * 7, cache, attention_mask=mask))
    torch.testing.assert_close(*outs)


# -- what is refused -----------------------------------------------------------------------------


def test_wrong_batch_size_is_refused_and_changes_nothing() -> None:
    model, ids = tiny.model(), tiny.tokens(2, 20)
    cache = OscarCache(model, large())
    tiny.logits(model, ids, cache)
    with pytest.raises(CacheError, match="holds 2 sequences, this batch has 3"):
        tiny.logits(model, tiny.tokens(3, 1), cache)
    more = tiny.logits(model, ids[:, :1], cache)  # still good
    expected = tiny.logits(model, torch.cat([ids, ids[:, :1]], 1))[:, -1:]
    torch.testing.assert_close(more, expected, atol=1e-4, rtol=1e-4)


def test_right_padding_is_refused() -> None:
    model, ids = tiny.model(), tiny.tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    cache = OscarCache(model, large())
    with pytest.raises(CacheError, match=r"padding_side = 'left'"):
        tiny.logits(model, ids, cache, attention_mask=mask)


def test_padding_between_turns_is_refused() -> None:
    model, ids = tiny.model(), tiny.tokens(2, 20)
    mask = torch.ones_like(ids)
    cache = OscarCache(model, large())
    tiny.logits(model, ids[:, :12], cache, attention_mask=mask[:, :12])
    mask[1, 12:15] = 0
    with pytest.raises(CacheError, match="hides tokens after the first"):
        tiny.logits(model, ids[:, 12:], cache, attention_mask=mask)


def test_missing_short_or_ready_masks_are_refused() -> None:
    model, inputs = tiny.model(), padded()
    cache = OscarCache(model, large())
    ids, mask = inputs["ids"], inputs["attention_mask"]
    tiny.logits(model, ids, cache, attention_mask=mask)
    with pytest.raises(CacheError, match="no attention mask"):
        tiny.logits(model, ids[:, :4], cache)
    with pytest.raises(CacheError, match="covers 4 tokens"):
        tiny.logits(model, ids[:, :4], cache, attention_mask=mask[:, :4])
    with pytest.raises(CacheError, match="2D attention masks"):
        tiny.logits(model, ids[:, :4], cache, attention_mask=torch.ones(3, 1, 4, 34).bool())
    assert cache.pages.lengths == [30, 25, 20]


def test_a_broken_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.model(), tiny.tokens(1, 20)
    cache = OscarCache(model, large())
    tiny.logits(model, ids, cache)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        tiny.logits(model, ids[:, :1], cache)
    handle.remove()
    with pytest.raises(CacheError, match="broken off"):
        tiny.logits(model, ids[:, :1], cache)
    cache.reset()
    torch.testing.assert_close(tiny.logits(model, ids, cache), tiny.logits(model, ids))


# -- other caches on an attached model -----------------------------------------------------------


def test_stock_caches_still_work() -> None:
    plain, inputs = tiny.model(), padded()
    mask = inputs["attention_mask"]
    expected = tiny.logits(plain, inputs["ids"], attention_mask=mask)
    generated = tiny.greedy(plain, **inputs)
    model = tiny.model()
    OscarCache(model, large())
    assert model.config._attn_implementation == "oscarkv"
    for cache in (None, DynamicCache(config=model.config)):
        found = tiny.logits(model, inputs["ids"], cache, attention_mask=mask)
        assert torch.equal(found, expected)
        assert torch.equal(tiny.greedy(model, **inputs), generated)
    static = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(tiny.greedy(model, **inputs, past_key_values=static), generated)


def test_gradients_still_flow() -> None:
    model, ids = tiny.model(), tiny.tokens(1, 20)
    OscarCache(model, large())
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
