"""SmolLM2 itself: fidelity, speed and identity of tokens with real weights."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import oscarkv
from oscarkv import Artifact, OscarCache
from oscarkv.evaluation.fidelity import measure_fidelity
from oscarkv.integrations.transformers.calibrate import calibrate_many

pytestmark = pytest.mark.slow
TEXTS = Path(oscarkv.__file__).parent / "demo" / "texts"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
)


def read(name: str) -> str:
    return (TEXTS / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return oscarkv.load_model("smollm2")


@pytest.fixture(scope="module")
def artifacts(loaded: tuple[Any, Any]) -> dict[str, Artifact]:
    names = ("balanced", "paper")
    model, tokenizer = loaded
    made = calibrate_many(
        model, tokenizer, [read("alice.txt")], recipes=names, tokens=8192, length=2048
    )
    return dict(zip(names, made, strict=True))


def test_five_times_closer_than_the_paper(
    loaded: tuple[Any, Any], artifacts: dict[str, Artifact]
) -> None:
    result = measure_fidelity(*loaded, [read("botchan.txt")], artifacts, length=2048, windows=2)
    ours, paper = result.recipes["balanced"], result.recipes["paper"]
    print(f"\nKL balanced {ours.kl:.4f} paper {paper.kl:.4f}, ppl {result.perplexity:.2f}")
    assert ours.kl <= paper.kl / 5
    assert ours.top1 > paper.top1
    assert ours.bits_128k <= 2.3


def test_tokens_are_the_stock_caches_where_windows_hold_all(
    loaded: tuple[Any, Any], artifacts: dict[str, Artifact]
) -> None:
    model, tokenizer = loaded
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": 40, "do_sample": False}
        expected = model.generate(**inputs, **options)
        cache = OscarCache(model, artifacts["balanced"])
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected)


@torch.no_grad()
def test_decoding_is_at_least_half_as_fast(
    loaded: tuple[Any, Any], artifacts: dict[str, Artifact]
) -> None:
    """Interleaved, so that whatever else the machine does hits both."""
    model, tokenizer = loaded
    ids = tokenizer(read("botchan.txt")[:20000], return_tensors="pt")["input_ids"][:, :2048]
    caches: dict[str, Any] = {
        "stock": DynamicCache(config=model.config),
        "ours": OscarCache(model, artifacts["balanced"]),
    }
    times: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, :1]
    for step in range(36):  # two of which pack sixteen tokens
        for name, cache in caches.items():
            start = time.perf_counter()
            model(token, past_key_values=cache)
            if step >= 4:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.mean(values) for name, values in times.items()}
    for name in times:
        print(f"\n{name}: {1e3 * medians[name]:.0f} ms median, {1e3 * means[name]:.0f} ms mean")
    assert medians["ours"] <= 2 * medians["stock"]
    assert means["ours"] <= 2 * means["stock"]
