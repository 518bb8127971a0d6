"""Bits go where they help, the budget holds, and the mixed artifact is what it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import OscarCache, Recipe, load_artifact, save_artifact
from oscarkv.artifact import Artifact
from oscarkv.artifact.summary import summarise
from oscarkv.errors import ArtifactError, OscarError
from oscarkv.evaluation import fidelity
from oscarkv.evaluation.fidelity import evaluation_windows, measure_fidelity, measure_windows
from oscarkv.evaluation.subjects import simulate_artifact
from oscarkv.evaluation.tune import KINDS, allocate, assemble, budget_steps, tune
from oscarkv.integrations.transformers.text import echo

LENGTH = 96


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "FIRST_SCORED", 40)
    monkeypatch.setattr(fidelity, "LOGITS_BLOCK", 16)


def fitted() -> dict[int, Artifact]:
    model = tiny.model()
    recipe = Recipe.named("compact", **tiny.SMALL)
    return {
        bits: tiny.quick_calibrate(model, recipe.replace(key_bits=bits, value_bits=bits))
        for bits in (2, 3, 4)
    }


@pytest.fixture(scope="module")
def artifacts() -> dict[int, Artifact]:
    return fitted()


def test_the_next_bit_goes_where_it_takes_away_most() -> None:
    costs = {
        (0, "keys"): {2: 16.0, 3: 4.0, 4: 1.0},
        (0, "values"): {2: 1.0, 3: 0.25, 4: 0.06},
        (1, "keys"): {2: 4.5, 3: 1.1, 4: 0.3},
        (1, "values"): {2: 0.1, 3: 0.2, 4: 0.1},  # noise: more bits never make it worse
    }
    expected = [
        {(0, "keys"): 2, (0, "values"): 2, (1, "keys"): 2, (1, "values"): 2},
        {(0, "keys"): 3, (0, "values"): 2, (1, "keys"): 2, (1, "values"): 2},
        {(0, "keys"): 3, (0, "values"): 2, (1, "keys"): 3, (1, "values"): 2},
        {(0, "keys"): 4, (0, "values"): 2, (1, "keys"): 3, (1, "values"): 2},
    ]
    for steps, bits in enumerate(expected):
        chosen, asked = given_out(costs, steps)
        assert chosen == bits
        # What could not win is not measured: the values' whole cost is less than any gain here.
        assert not any(side == "values" for (_, side), _ in asked)
        assert len(asked) == len(set(asked))
    assert set(given_out(costs, 100)[0].values()) == {4, 2}
    assert given_out(costs, 100)[0][1, "values"] == 2
    flat = {(0, "keys"): {2: 1.0, 3: 1.0, 4: 1.0}}
    assert given_out(flat, 5)[0] == {(0, "keys"): 2}
    assert allocate({(0, "keys"): 1.0}, [2], 5, pytest.fail) == {(0, "keys"): 2}


def given_out(
    costs: Mapping[Any, Mapping[int, float]], steps: int
) -> tuple[dict[Any, int], list[tuple[Any, int]]]:
    asked = []

    def cost(part: Any, bits: int) -> float:
        asked.append((part, bits))
        return costs[part][bits]

    lowest = {part: by_bits[2] for part, by_bits in costs.items()}
    return allocate(lowest, [2, 3, 4], steps, cost), asked


def test_a_great_gain_behind_a_small_one_is_not_missed_for_long() -> None:
    costs = {(0, "keys"): {2: 8.0, 3: 7.0, 4: 0.5}, (1, "keys"): {2: 4.0, 3: 1.0, 4: 0.5}}
    assert given_out(costs, 3)[0] == {(0, "keys"): 4, (1, "keys"): 3}


def test_the_budget_holds(artifacts: dict[int, Artifact]) -> None:
    base = artifacts[2]
    by_bits = {2: 4.0, 3: 1.0, 4: 0.2}
    costs = {(i, side): by_bits for i in (0, 1) for side in ("keys", "values")}
    for extra in (0.0, 0.24, 0.26, 0.5, 1.0):
        steps = budget_steps(base, base.bits() + extra)
        mixed = assemble(artifacts, given_out(costs, steps)[0])
        assert mixed.bits() <= base.bits() + extra + 1e-9
        assert mixed.bits() > base.bits() + extra - 0.25  # the next one would not fit


def test_a_mixed_artifact(artifacts: dict[int, Artifact], tmp_path: Path) -> None:
    chosen = {(0, "keys"): 3, (0, "values"): 2, (1, "keys"): 2, (1, "values"): 4}
    mixed = assemble(artifacts, chosen)  # type: ignore[arg-type]
    assert mixed.layer_bits == {0: (3, 2), 1: (2, 4)}
    assert mixed.layer_recipe(0).key_bits == 3
    codes = (3 + 2 + 2 + 4) / 4
    assert mixed.history_bits == pytest.approx(codes + 8 / 32)
    torch.testing.assert_close(mixed.layers[0].errors[0], artifacts[3].layers[0].errors[0])
    torch.testing.assert_close(mixed.layers[0].errors[1], artifacts[2].layers[0].errors[1])

    path = tmp_path / "mixed.safetensors"
    save_artifact(mixed, path)
    again = load_artifact(path)
    assert again.layer_bits == mixed.layer_bits
    assert summarise(again).bits[131072] == pytest.approx(mixed.bits())
    assert [(x.key_bits, x.value_bits) for x in summarise(again).layers] == [(3, 2), (2, 4)]
    assert [again.layer_recipe(layer).refined for layer in (0, 1)] == [True, True]

    # The packed cache holds each layer with its own bits, and reads them back.
    model = tiny.model()
    cache = OscarCache(model, again, strict=True)
    widths = [layer.store.layout.bytes for layer in cache._packed]
    assert widths[0] != widths[1]
    subjects = {"packed": again, "simulated": simulate_artifact(again, model.device)}
    result = measure_fidelity(
        model, tiny.tokenizer(), [tiny.text(700, seed=5)], subjects, length=LENGTH, windows=2
    )
    kl = {name: score.kl for name, score in result.recipes.items()}
    assert kl["packed"] == pytest.approx(kl["simulated"], rel=0.05)
    ids = tiny.tokens(1, 60)
    whole = tiny.decode_logits(model, ids, OscarCache(model, again, strict=True), 60)
    steps = tiny.decode_logits(model, ids, OscarCache(model, again, strict=True), 1)
    torch.testing.assert_close(whole, steps, atol=2e-3, rtol=2e-3)


def test_more_bits_are_better_and_predicted(tmp_path: Path) -> None:
    model = tiny.model()
    texts = [tiny.text(4000, seed=1)]
    knobs = {"tokens": 1500, "calibration_length": 500, "length": LENGTH, "windows": 3}
    recipe = Recipe.named("compact", **tiny.SMALL)
    base_bits = recipe.bits(32)
    keep = tmp_path / "new"
    found = tune(
        model, tiny.tokenizer(), texts, base_bits + 0.51, recipe=recipe, keep=keep, **knobs
    )
    assert len(list(keep.glob("*.safetensors"))) == 3
    assert sum(k + v - 4 for k, v in found.artifact.layer_bits.values()) == 2
    assert found.artifact.bits() <= base_bits + 0.51
    windows = evaluation_windows(model, tiny.tokenizer(), texts, LENGTH, 3)
    kinds = {"running": windows, "looked up": [echo(x, tiny.tokenizer()) for x in windows]}
    assert tuple(kinds) == KINDS
    for kind, sequences in kinds.items():
        result = measure_windows(model, sequences, "", {"tuned": found.artifact})
        kl = result.recipes["tuned"].kl
        assert kl < found.base_kl[kind]
        assert kl == pytest.approx(found.predicted_kl[kind], rel=0.5)
    # An interrupted run goes on: nothing is measured twice, and the same comes out.
    again = tune(
        model, tiny.tokenizer(), texts, base_bits + 0.51, recipe=recipe, keep=keep, **knobs
    )
    assert again.artifact.layer_bits == found.artifact.layer_bits
    assert again.alone == found.alone


def test_refusals(artifacts: dict[int, Artifact], tmp_path: Path) -> None:
    model = tiny.model()
    texts = [tiny.text(4000, seed=1)]
    with pytest.raises(OscarError, match=r"--bits 2\.0: recipe 'compact' takes 2\.2\d+ bits"):
        tune(
            model,
            tiny.tokenizer(),
            texts,
            2.0,
            recipe=Recipe.named("compact", **tiny.SMALL),
            tokens=1500,
            calibration_length=500,
        )
    with pytest.raises(OscarError, match=r"--length 640: .* outgrow the 320 .* more than 640"):
        tune(model, tiny.tokenizer(), texts, 3.0, recipe=Recipe.named("compact"), length=640)
    with pytest.raises(OscarError, match="recipe 'bf16' packs nothing"):
        tune(model, tiny.tokenizer(), texts, 2.3, recipe=Recipe.named("bf16"))
    with pytest.raises(ArtifactError, match=r"layer 0: .* bits; use 2, 3 or 4"):
        Artifact(
            artifacts[2].model, artifacts[2].recipe, artifacts[2].layers, layer_bits={0: (5, 2)}
        )
    with pytest.raises(ArtifactError, match="bits of layer 7, which has no transforms"):
        Artifact(
            artifacts[2].model, artifacts[2].recipe, artifacts[2].layers, layer_bits={7: (3, 2)}
        )
