"""OscarCache with windows far shorter than the text: the packed history is really read."""

from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import Artifact, OscarCache, Recipe
from oscarkv.integrations.transformers.cache import DECODE_TOKENS


def small() -> Artifact:
    return tiny.calibrated()


def masked(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded sequences."""
    ids = tiny.tokens(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return {"ids": ids * mask, "attention_mask": mask}


def padded_logits(
    model: Any, inputs: dict[str, torch.Tensor], cache: OscarCache, cuts: list[int]
) -> torch.Tensor:
    """Logits of a padded batch fed in pieces, positions as generate() counts them."""
    ids, mask = inputs["ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        rows = slice(start, stop)
        parts.append(
            tiny.logits(
                model,
                ids[:, rows],
                cache,
                attention_mask=mask[:, :stop],
                position_ids=positions[:, rows],
            )
        )
    return torch.cat(parts, 1)


RECIPES = {
    "uniform": {},
    "compact": {},
    "precise": {},
    "retrieval": {},
    "paper": {},
    "paper-softmax": {"group_size": 16},
    "naive-int2": {},
    "uniform-even": {"refine_keys": False},
    "uniform-metric": {"metric_rounding": True, "refine_keys": False},
    "uniform-k3v4": {"key_bits": 3, "value_bits": 4},
    "uniform-fp16": {"parameters": "fp16"},
    "bf16": {},
}


@pytest.mark.parametrize("name", RECIPES)
def test_decode_agrees_with_strict_prefill(name: str) -> None:
    model, ids = tiny.model(), tiny.tokens(2, 60)
    recipe = Recipe.named(
        "uniform" if name.startswith("uniform") else name, **tiny.SMALL, **RECIPES[name]
    )
    artifact = tiny.quick_calibrate(model, recipe)
    whole = tiny.logits(model, ids, OscarCache(model, artifact, strict=True))
    steps = tiny.decode_logits(model, ids, OscarCache(model, artifact, strict=True), 9)
    chunks = padded_logits(
        model,
        {"ids": ids, "attention_mask": torch.ones_like(ids)},
        OscarCache(model, artifact, strict=True),
        [1, 4, 20, 21, 37],
    )
    tiny.assert_same_rows(steps, whole)
    tiny.assert_same_rows(chunks, whole)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("prompt", [1, 13, 31])
def test_after_a_prompt_decoding_does_not_depend_on_the_step(page_size: int, prompt: int) -> None:
    """One token a step, or several (as when guesses are checked)."""
    model, ids = tiny.model(), tiny.tokens(1, 55)
    results = []
    for step in (1, 3, DECODE_TOKENS):
        cache = OscarCache(model, small(), page_size=page_size)
        inputs = {"ids": ids, "attention_mask": torch.ones_like(ids)}
        results.append(padded_logits(model, inputs, cache, list(range(prompt, 55, step))))
    tiny.assert_same_rows(results[1], results[0])
    tiny.assert_same_rows(results[2], results[0])


@pytest.mark.parametrize("strict", [False, True])
def test_padded_sequences_are_as_if_alone(strict: bool) -> None:
    model, lengths = tiny.model(), [50, 43, 17, 29]
    inputs = masked(lengths)
    cuts = [36, 37, 38, 44]
    together = padded_logits(model, inputs, OscarCache(model, small(), strict=strict), cuts)
    for row, length in enumerate(lengths):
        pad = 50 - length
        alone = {"ids": inputs["ids"][row : row + 1, pad:]}
        alone["attention_mask"] = torch.ones_like(alone["ids"])
        own_cuts = [cut - pad for cut in cuts if cut > pad]
        cache = OscarCache(model, small(), strict=strict)
        expected = padded_logits(model, alone, cache, own_cuts)
        tiny.assert_same_rows(together[row : row + 1, pad:], expected)


def test_padded_batch_generates_as_if_alone() -> None:
    model, lengths = tiny.model(), [40, 25, 33]
    inputs = masked(lengths)
    out = tiny.greedy(model, **inputs, past_key_values=OscarCache(model, small()))
    for row, length in enumerate(lengths):
        ids = inputs["ids"][row : row + 1, 40 - length :]
        alone = tiny.greedy(model, ids, past_key_values=OscarCache(model, small()))
        assert torch.equal(out[row, 40 - length :], alone[0])


def test_reordered_sequences_stay_apart() -> None:
    """What beams do: share a prompt, part, swap, part again."""
    model = tiny.model()
    together = OscarCache(model, small())
    alone: list[OscarCache] = []
    history = [[] for _ in range(3)]
    tiny.logits(model, tiny.tokens(1, 37), together)
    together.batch_repeat_interleave(3)
    for step, order in enumerate([[0, 1, 2], [2, 2, 0], [1, 0, 0], [0, 2, 1], [1, 1, 1]] * 5):
        together.reorder_cache(torch.tensor(order))
        history = [list(history[i]) for i in order]
        new = tiny.tokens(3, 1, seed=step)
        for row, token in zip(history, new[:, 0].tolist(), strict=True):
            row.append(token)
        found = tiny.logits(model, new, together)
    for row in range(3):
        alone.append(OscarCache(model, small()))
        tiny.logits(model, tiny.tokens(1, 37), alone[row])
        for token in history[row]:
            expected = tiny.logits(model, torch.tensor([[token]]), alone[row])
        tiny.assert_same_rows(found[row : row + 1], expected)


def test_beams_and_assisted_decoding_agree_with_plain_decoding() -> None:
    model = tiny.model()
    ids = tiny.tokenizer()(tiny.text(60), return_tensors="pt")["input_ids"]
    plain = tiny.greedy(model, ids, 24, past_key_values=OscarCache(model, small()))
    cache = OscarCache(model, small())
    assisted = tiny.greedy(model, ids, 24, past_key_values=cache, prompt_lookup_num_tokens=4)
    # A prompt's own guesses are checked in the prefill, so the two may read differently there.
    assert torch.equal(assisted[:, :61], plain[:, :61])
    assert cache.get_seq_length() == cache.pages.lengths[0]
    cache = OscarCache(model, small())
    beams = tiny.greedy(model, ids, 24, past_key_values=cache, num_beams=3)
    assert beams.shape == plain.shape
    assert cache.pages.lengths == [83] * 3


@pytest.mark.parametrize("removed", [1, 5, 16, 30])
@pytest.mark.parametrize("recent", [8, 24])
def test_cropped_tokens_leave_no_trace(removed: int, recent: int) -> None:
    """Guesses come in one step and go in one crop."""
    whole = small()
    artifact = Artifact(whole.model, whole.recipe.replace(recent=recent), whole.layers)
    model, ids = tiny.model(), tiny.tokens(2, 60)
    cache, other = (OscarCache(model, artifact, page_size=16) for _ in range(2))
    tiny.logits(model, ids[:, :41], cache)
    tiny.logits(model, tiny.tokens(2, removed, seed=9), cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == 41
    found = tiny.logits(model, ids[:, 41:], cache)
    tiny.logits(model, ids[:, :41], other)
    tiny.assert_same_rows(found, tiny.logits(model, ids[:, 41:], other))


def test_cropping_far_back_fills_the_window_from_the_history() -> None:
    """Only then is a window approximate: its exact copies are long gone."""
    model, ids = tiny.model(), tiny.tokens(1, 60)
    cache, other = OscarCache(model, small()), OscarCache(model, small())
    tiny.decode_logits(model, ids, cache, 10)
    cache.crop(-35)
    assert cache.pages.lengths == [25]
    found = tiny.logits(model, ids[:, :1], cache)
    tiny.decode_logits(model, ids[:, :25], other, 10)
    expected = tiny.logits(model, ids[:, :1], other)
    exact = tiny.logits(model, torch.cat([ids[:, :25], ids[:, :1]], 1))[:, -1:]
    assert (found - expected).norm() < 2 * (exact - expected).norm()
    cache.crop(-26)
    assert cache.get_seq_length() == 0
    again = tiny.decode_logits(model, ids, cache, 10)
    fresh = tiny.decode_logits(model, ids, OscarCache(model, small()), 10)
    tiny.assert_same_rows(again, fresh)


def test_two_caches_of_one_model_do_not_mix() -> None:
    model, ids = tiny.model(), tiny.tokens(2, 50)
    first, second = OscarCache(model, small()), OscarCache(model, tiny.calibrated(recipe="paper"))
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for start in range(0, 50, 5):
        for row, cache in enumerate((first, second)):
            parts[row].append(tiny.logits(model, ids[row : row + 1, start : start + 5], cache))
    for row, recipe in enumerate(("uniform", "paper")):
        cache = OscarCache(model, tiny.calibrated(recipe=recipe))
        inputs = {"ids": ids[row : row + 1], "attention_mask": torch.ones(1, 50).long()}
        expected = padded_logits(model, inputs, cache, list(range(5, 50, 5)))
        tiny.assert_same_rows(torch.cat(parts[row], 1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype) -> None:
    model, ids = tiny.model(dtype=dtype), tiny.tokens(1, 50)
    artifact = tiny.quick_calibrate(model)
    cache = OscarCache(model, artifact)
    assert cache.pages.layers[0].window.dtype == dtype
    found = tiny.decode_logits(model, ids, cache, 20)
    assert found.dtype == dtype
    wide = model.float()
    reference = tiny.decode_logits(wide, ids, OscarCache(wide, artifact), 20)
    assert (found.float() - reference).norm() < 0.2 * reference.norm()


@pytest.mark.parametrize(
    ("steps", "removed"),
    [
        ([30], 0),
        ([100, 30, 30], 60),  # windows are filled in again from the history
        ([100, 40, 40, 20], 0),  # pools have grown and shrunk, and shared pages are copied
    ],
)
def test_inference_mode_may_come_and_go(steps: list[int], removed: int) -> None:
    model, ids = tiny.model(), tiny.tokens(1, sum(steps) + 1)
    *chunks, token = ids.split([*steps, 1], 1)
    cache, other = OscarCache(model, small()), OscarCache(model, small())
    for chunk in chunks:
        with torch.inference_mode():
            model(chunk, past_key_values=cache)
        tiny.logits(model, chunk, other)
    cache.crop(-removed)
    other.crop(-removed)
    cache.batch_repeat_interleave(2)
    found = tiny.logits(model, token.expand(2, 1), cache)
    cache.crop(-1)
    model(token.expand(2, 1), past_key_values=cache)  # with gradients on
    cache.crop(-1)
    again = tiny.logits(model, token.expand(2, 1), cache)
    expected = tiny.logits(model, token, other).expand_as(found)
    tiny.assert_same_rows(found, expected)
    tiny.assert_same_rows(again, expected)
