"""SmolLM2 itself: speed and identity of tokens with real weights. Fidelity: make accuracy."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import oscarkv
from oscarkv import Artifact, OscarCache

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
def artifact(loaded: tuple[Any, Any]) -> Artifact:
    text = [read("alice.txt")]
    return oscarkv.calibrate(*loaded, text, tokens=4096, length=2048, general=False)


def test_tokens_are_the_stock_caches_where_windows_hold_all(
    loaded: tuple[Any, Any], artifact: Artifact
) -> None:
    model, tokenizer = loaded
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": 40, "do_sample": False}
        expected = model.generate(**inputs, **options)
        cache = OscarCache(model, artifact)
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What a thread is given is its own work: several wait for each other as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.usefixtures("one_thread")
def test_decoding_takes_at_most_twice_the_work(loaded: tuple[Any, Any], artifact: Artifact) -> None:
    """Of the processor, whatever else it does meanwhile."""
    model, tokenizer = loaded
    ids = tokenizer(read("botchan.txt")[:20000], return_tensors="pt")["input_ids"][:, :2048]
    caches: dict[str, Any] = {
        "stock": DynamicCache(config=model.config),
        "ours": OscarCache(model, artifact),
    }
    times: dict[str, list[float]] = {name: [] for name in caches}
    for cache in caches.values():
        model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, :1]
    for step in range(36):  # two of which pack sixteen tokens
        for name, cache in caches.items():
            start = time.process_time()
            model(token, past_key_values=cache)
            if step >= 4:
                times[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.mean(values) for name, values in times.items()}
    for name in times:
        print(f"\n{name}: {1e3 * medians[name]:.0f} ms median, {1e3 * means[name]:.0f} ms mean")
    assert medians["ours"] <= 2 * medians["stock"]
    assert means["ours"] <= 2 * means["stock"]
