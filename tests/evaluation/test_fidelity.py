"""Fidelity of recipes on a tiny model: the figures mean what they say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import Artifact, OscarCache, Recipe
from oscarkv.errors import OscarError
from oscarkv.evaluation import fidelity
from oscarkv.evaluation.fidelity import Fidelity, measure_fidelity
from oscarkv.integrations.transformers.predictions import log_probabilities

LENGTH, FIRST = 96, 40


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score short windows."""
    monkeypatch.setattr(fidelity, "FIRST_SCORED", FIRST)
    monkeypatch.setattr(fidelity, "LOGITS_BLOCK", 16)


def artifacts(model: Any, *names: str) -> dict[str, Artifact]:
    return {n: tiny.quick_calibrate(model, Recipe.named(n, **tiny.SMALL)) for n in names}


def measured(model: Any, found: dict[str, Artifact], **options: Any) -> Fidelity:
    knobs: dict[str, Any] = {"length": LENGTH, "windows": 3}
    text = tiny.text(700, seed=5)
    return measure_fidelity(model, tiny.tokenizer(), [text], found, **(knobs | options))


def test_figures_against_token_by_token_decoding() -> None:
    """`strict` reads a window whole, and still sees what decoding would see."""
    model = tiny.model()
    found = artifacts(model, "uniform", "naive-int2")
    result = measured(model, found)
    sequences = fidelity.evaluation_windows(
        model, tiny.tokenizer(), [tiny.text(700, seed=5)], LENGTH, 3
    )
    for name, artifact in found.items():
        kls, agreements, changes = [], [], []
        for ids in sequences:
            exact = tiny.logits(model, ids).log_softmax(-1)[0, FIRST:-1].double()
            cache = OscarCache(model, artifact, strict=True)
            steps = tiny.decode_logits(model, ids, cache, 1).log_softmax(-1)[0, FIRST:-1].double()
            kls.append((exact.exp() * (exact - steps)).sum(-1).mean())
            agreements.append((exact.argmax(-1) == steps.argmax(-1)).double().mean())
            target = ids[0, FIRST + 1 :, None]
            changes.append((exact.gather(1, target) - steps.gather(1, target)).mean())
        score = result.recipes[name]
        kl = torch.stack(kls)
        assert score.kl == pytest.approx(float(kl.mean()), rel=0.02)
        assert score.kl_by_window == pytest.approx(kl.tolist(), rel=0.05)
        assert score.kl_se == pytest.approx(float(kl.std() / 3**0.5), rel=0.1)
        assert score.top1 == pytest.approx(float(torch.stack(agreements).mean()), abs=0.02)
        ratio = math.exp(float(torch.stack(changes).mean()))
        assert score.ppl_ratio == pytest.approx(ratio, rel=0.01)
        assert sorted(score.layer_errors) == [0, 1]


def test_bf16_is_nearly_exact_and_int2_is_not() -> None:
    model = tiny.model()
    result = measured(model, artifacts(model, "bf16", "uniform", "naive-int2"))
    exact, ours, naive = (result.recipes[n] for n in ("bf16", "uniform", "naive-int2"))
    assert 0 <= exact.kl < 2e-4
    assert exact.top1 > 0.97
    assert exact.ppl_ratio == pytest.approx(1, abs=1e-2)
    assert exact.kl * 20 < ours.kl < naive.kl
    assert exact.bits_128k == 16
    assert ours.bits_128k == pytest.approx(Recipe.named("uniform", **tiny.SMALL).bits(32))
    assert ours.bits_actual > ours.bits_128k
    assert exact.bits_actual >= 16


def test_the_file(tmp_path: Path) -> None:
    model = tiny.model()
    result = measured(model, artifacts(model, "uniform"))
    result.save(tmp_path / "f.json")

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    saved = json.loads((tmp_path / "f.json").read_text(), parse_constant=refuse)
    assert {"format", "model", "text_sha256", "recipes"} <= saved.keys()
    assert saved["format"] == "oscarkv-fidelity-1"
    assert saved["model"]
    assert len(saved["text_sha256"]) == 64
    needed = {"kl", "kl_se", "top1", "ppl_ratio", "bits_128k", "bits_actual"}
    assert needed <= saved["recipes"]["uniform"].keys()
    assert all(isinstance(saved["recipes"]["uniform"][key], float) for key in needed)


def test_what_is_unknown_is_null(tmp_path: Path) -> None:
    model = tiny.model()
    result = measured(model, artifacts(model, "uniform"), windows=1, length=48)
    assert math.isnan(result.recipes["uniform"].kl_se)  # one block of one window
    result.save(tmp_path / "f.json")
    assert json.loads((tmp_path / "f.json").read_text())["recipes"]["uniform"]["kl_se"] is None


def test_deterministic() -> None:
    model = tiny.model()
    found = artifacts(model, "uniform")
    assert measured(model, found) == measured(model, found)


def test_chunks_read_more_exactly_than_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    found = artifacts(model, "uniform")
    strict = measured(model, found).recipes["uniform"].kl
    monkeypatch.setattr(fidelity, "CHUNK", 32)
    chunked = measured(model, found, strict=False)
    assert not chunked.strict
    assert 0 < chunked.recipes["uniform"].kl < strict


@pytest.mark.parametrize("name", ["gemma3", "qwen2", "cohere2"])
def test_logits_are_the_models_own(name: str) -> None:
    model = tiny.model(name)
    ids = tiny.tokens(1, 60)
    hidden = model.base_model(input_ids=ids).last_hidden_state[0]
    found = log_probabilities(model, hidden)
    torch.testing.assert_close(found, tiny.logits(model, ids)[0].float().log_softmax(-1))


def test_refusals() -> None:
    model = tiny.model()
    found = artifacts(model, "bf16")
    with pytest.raises(OscarError, match="7 windows of 96 tokens, 9 were asked for"):
        measured(model, found, windows=9)
    with pytest.raises(OscarError, match="beyond the model's context of 1024"):
        measured(model, found, length=4096)
    with pytest.raises(OscarError, match="positions from 40 on are scored"):
        measured(model, found, length=40)


def test_progress_counts_to_the_end() -> None:
    model = tiny.model()
    calls: list[tuple[int, int, str]] = []
    measured(model, artifacts(model, "bf16"), progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(i + 1, 6) for i in range(6)]
