"""The cache that rounds without packing reads what the window rule says, and what packing gives."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import generator
from integrations import tiny
from torch import Tensor

from oscarkv import Recipe
from oscarkv.errors import CacheError
from oscarkv.evaluation.subjects import simulate_artifact
from oscarkv.integrations.transformers import simulate
from oscarkv.integrations.transformers.attention import attention_implementation
from oscarkv.integrations.transformers.cache import OscarCache
from oscarkv.integrations.transformers.geometry import rope_at
from oscarkv.integrations.transformers.simulate import (
    SimulatedCache,
    Windows,
    collect_samples,
    fit_simulation,
    rounded_attention,
)
from oscarkv.methods import named, simulations


class Shrink:
    """Rounding that is easy to tell: keys halved, values negated."""

    def keys(self, keys: Tensor) -> Tensor:
        return keys / 2

    def values(self, values: Tensor) -> Tensor:
        return -values


@pytest.mark.parametrize(
    ("sink", "recent", "group"), [(0, 1, 1), (4, 8, 1), (5, 7, 4), (64, 4, 1), (3, 200, 1)]
)
def test_attention_follows_the_window_rule(
    sink: int, recent: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "QUERY_BLOCK", 16)
    rng = generator(0)
    q = torch.randn(4, 50, 8, generator=rng)
    k, v = torch.randn(2, 2, 50, 8, generator=rng)
    out = rounded_attention(q, k, v, Shrink(), Windows(sink, recent, group), 0.5)
    for t in (0, 3, 15, 16, 31, 49):
        frontier = sink + max(0, t - recent + 1 - sink) // group * group
        rounded = [sink <= j < frontier for j in range(t + 1)]
        for head in range(4):
            keys = k[head // 2, : t + 1].clone()
            values = v[head // 2, : t + 1].clone()
            keys[rounded] /= 2
            values[rounded] *= -1
            p = torch.softmax(0.5 * keys @ q[head, t], 0)
            torch.testing.assert_close(out[head, t], p @ values, atol=1e-5, rtol=1e-5)


def test_windows_in_fp8_are_read_so_and_the_history_is_rounded_from_what_came() -> None:
    rng = generator(0)
    q, k, v = torch.randn(3, 1, 40, 8, generator=rng)
    short, coarse = Windows(4, 8, bits=8), [x.to(torch.float8_e4m3fn).float() for x in (k, v)]
    out = rounded_attention(q, k, v, Shrink(), short, 0.5)
    keys, values = (x[0].clone() for x in coarse)
    keys[4:32], values[4:32] = k[0, 4:32] / 2, -v[0, 4:32]
    expected = torch.softmax(0.5 * keys @ q[0, 39], 0) @ values
    torch.testing.assert_close(out[0, 39], expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, rounded_attention(q, k, v, Shrink(), Windows(4, 8), 0.5))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi", "llama-yarn", "llama-96"])
def test_rounding_an_artifact_gives_what_packing_it_gives(name: str) -> None:
    model = tiny.model(name)
    artifact = tiny.quick_calibrate(model, Recipe.named("uniform", **tiny.SMALL))
    ids = tiny.tokens(1, 120)
    packed = logits(model, ids, OscarCache(model, artifact, strict=True))
    subject = simulate_artifact(artifact, model.device)
    rounded = logits(model, ids, subject.make_cache(model))
    exact = tiny.logits(model, ids)
    moved = float((packed - exact).norm())
    assert moved > 0
    # A code at a threshold may fall either way; all else is the order of sums.
    assert float((packed - rounded).norm()) < 0.05 * moved


def logits(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad(), attention_implementation(model):
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "phi", "cohere2", "gemma3", "glm4"])
def test_rope_can_be_undone(name: str) -> None:
    """Turned back, a key no longer knows its position."""
    model = tiny.model(name)
    layer = 1 if name == "gemma3" else 0
    ids = torch.full((1, 12), 7)
    found = collect_samples(model, [ids], [layer], before_rope=True, gradients=False)[layer]
    turned = collect_samples(model, [ids], [layer], before_rope=False, gradients=False)[layer]
    rope = rope_at(model, layer, torch.arange(12))
    assert rope is not None
    torch.testing.assert_close(rope.turn(found.keys), turned.keys, atol=1e-5, rtol=1e-4)
    if layer == 0:  # the same token, and nothing before it differs: only RoPE does
        same = found.keys[:, :1].expand_as(found.keys)
        torch.testing.assert_close(found.keys, same, atol=1e-4, rtol=1e-3)
        assert not torch.allclose(turned.keys, turned.keys[:, :1].expand_as(turned.keys))


def test_gradients_are_those_of_the_loss() -> None:
    model = tiny.model()
    ids = tiny.tokens(1, 40)
    found = collect_samples(model, [ids], [0, 1], before_rope=False, gradients=True)
    before = tiny.logits(model, ids)
    gradient = found[1].value_gradients
    assert gradient is not None
    step = 1e-2 * gradient / gradient.norm()

    class Nudge:
        def __init__(self, sign: float) -> None:
            self.sign = sign

        def keys(self, keys: Tensor) -> Tensor:
            return keys

        def values(self, values: Tensor) -> Tensor:
            return values + self.sign * step[:, : values.shape[1]]

    def loss(sign: float) -> float:
        # Every value but the query's own is "rounded"; nudge that part of the gradient only.
        cache = SimulatedCache(model, {1: Nudge(sign)}, Windows(0, 1))
        predicted = logits(model, ids, cache).double().log_softmax(-1)
        return -float(predicted[0, :-1].gather(1, ids[0, 1:, None]).mean())

    change = (loss(1.0) - loss(-1.0)) / 2
    assert change > 0
    assert change == pytest.approx(float((gradient * step).sum()), rel=0.5)
    assert torch.equal(tiny.logits(model, ids), before)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", sorted(simulations()))
@pytest.mark.parametrize("model_name", ["qwen2", "gemma3", "olmo2"])
def test_every_method_on_a_model(name: str, model_name: str) -> None:
    model = tiny.model(model_name)
    layers = [1] if model_name == "gemma3" else [0, 1]
    method = dataclasses.replace(named(name), sink=4, recent=8)
    quantizers = fit_simulation(model, method, [tiny.tokens(1, 96, seed=3)], layers)
    windows = Windows(method.sink, method.recent, method.token_group)
    ids = tiny.tokens(1, 80)
    found = logits(model, ids, SimulatedCache(model, quantizers, windows))
    exact = tiny.logits(model, ids)
    torch.testing.assert_close(found[:, :12], exact[:, :12], atol=1e-4, rtol=1e-4)
    moved = float((found - exact)[:, 12:].norm() / exact[:, 12:].norm())
    assert 1e-4 < moved < 1.5
    assert math.isfinite(moved)


def test_it_cannot_generate() -> None:
    model = tiny.model()
    cache = SimulatedCache(model, {0: Shrink(), 1: Shrink()}, Windows(4, 8))
    logits(model, tiny.tokens(1, 20), cache)
    with pytest.raises(CacheError, match="it cannot generate"):
        logits(model, tiny.tokens(1, 1), cache)
