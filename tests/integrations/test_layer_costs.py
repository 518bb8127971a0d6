"""What rounding a part costs is measured right, and once; bits go by it; artifacts hold them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import tiny

from oscarkv import OscarCache, Recipe, load_artifact, save_artifact
from oscarkv.artifact import Artifact
from oscarkv.artifact.summary import summarise
from oscarkv.calibration.budget import SIDES, with_more
from oscarkv.errors import ArtifactError, RecipeError
from oscarkv.evaluation import fidelity
from oscarkv.evaluation.checkpoint import Checkpoint
from oscarkv.evaluation.fidelity import measure_fidelity
from oscarkv.evaluation.subjects import simulate_artifact
from oscarkv.integrations.transformers import layer_costs
from oscarkv.integrations.transformers.geometry import attention_modules, decoder_layers
from oscarkv.integrations.transformers.layer_costs import (
    KINDS,
    LayerCosts,
    measuring_sequences,
    share_out,
)
from oscarkv.integrations.transformers.text import again

LENGTH = 96
COMPACT = Recipe.named("compact", **tiny.SMALL)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return tiny.quick_calibrate(tiny.model(), COMPACT)


@pytest.fixture(scope="module")
def costs(artifact: Artifact) -> LayerCosts:
    model = tiny.model()
    sequences = measuring_sequences(
        model, tiny.tokenizer(), [tiny.text(2000, seed=1)], COMPACT, general=True, length=LENGTH
    )
    assert len(sequences) == 2  # of the given text and of the general one
    return LayerCosts(model, artifact, sequences)


def test_a_passage_comes_again() -> None:
    ids = torch.arange(10, 21)[None]
    assert again(ids, tiny.tokenizer()).tolist() == [[*range(10, 18), 10, 11, 12]]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "glm4"])
def test_layers_that_run_one_after_the_other(name: str) -> None:
    model = tiny.model(name)
    layers = decoder_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    for index, attention in attention_modules(model).items():
        assert attention in set(layers[index].modules())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_that_are_not_run_again_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(name)
    artifact = tiny.quick_calibrate(model, COMPACT)
    sequences = [tiny.tokens(1, LENGTH, seed) for seed in (0, 1)]
    layers = sorted(artifact.layers)
    found = LayerCosts(model, artifact, sequences)
    short = {(i, side): found.part((i, side)) for i in layers for side in SIDES}
    assert not any("forward" in vars(layer) for layer in found.layers)  # put back
    monkeypatch.setattr(layer_costs, "decoder_layers", lambda _: [])
    whole = LayerCosts(model, artifact, sequences)
    for part, cost in short.items():
        assert cost == pytest.approx(whole.part(part), rel=1e-4, abs=1e-9)
        assert all(kl > 0 for kl in cost.values())


def test_costs_are_those_of_the_fidelity_lab(
    costs: LayerCosts, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL of the same positions, measured another way."""
    model = tiny.model()
    subject = simulate_artifact(artifact, model.device).part(layers=[1], sides=["keys"])
    found = dict.fromkeys(KINDS, 0.0)
    for reading in costs._readings:
        exact, rounded = (
            fidelity._hidden_states(model, reading.sequence, cache, True)
            for cache in (None, subject.make_cache(model))
        )
        for kind, positions in reading.scored.items():
            p, q = (
                torch.log_softmax(model.lm_head(hidden[positions]).float(), -1)
                for hidden in (exact, rounded)
            )
            found[kind] += float((p.exp() * (p - q)).sum(-1).mean().detach()) / len(costs._readings)
    assert costs.part((1, "keys")) == pytest.approx(found, rel=1e-3)


def test_more_bits_cost_less(costs: LayerCosts, artifact: Artifact) -> None:
    for layer in artifact.layers:
        for side in SIDES:
            less, more = (costs.part((layer, side), more=more) for more in (False, True))
            for kind in KINDS:
                assert more[kind] < less[kind] < costs.whole()[kind] * 1.5


def test_weights_of_16_bits_are_measured_as_well(costs: LayerCosts, artifact: Artifact) -> None:
    """Computed in 16 bits, parts would cost what they cost and the rounding of 16 bits."""
    model = tiny.model().to(torch.bfloat16)
    sequences = [reading.sequence for reading in costs._readings]
    halves = LayerCosts(model, artifact, sequences)
    wide = LayerCosts(model.float(), artifact, sequences)
    for layer in artifact.layers:
        for side in SIDES:
            found, expected = halves.part((layer, side)), wide.part((layer, side))
            assert found == pytest.approx(expected, rel=0.01)


def budgeted(artifact: Artifact, parts: int) -> Artifact:
    """With a budget for so many parts of a model's four."""
    recipe = artifact.recipe.replace(budget=artifact.bits() + 0.25 * parts + 0.01)
    return Artifact(artifact.model, recipe, artifact.layers, artifact.calibration)


def test_bits_are_shared_out(artifact: Artifact, tmp_path: Path) -> None:
    model, texts = tiny.model(), [tiny.text(4000, seed=1)]
    wanted = budgeted(artifact, 2)
    assert share_out(model, tiny.tokenizer(), texts, budgeted(artifact, 0)).layer_bits == {}
    seen: list[tuple[int, int, str]] = []
    found = share_out(
        model,
        tiny.tokenizer(),
        texts,
        wanted,
        length=LENGTH,
        known=Checkpoint(tmp_path),
        progress=lambda *now: seen.append(now),
    )
    assert sum(k + v - 4 for k, v in found.layer_bits.values()) == 2
    assert found.bits() <= wanted.recipe.budget
    assert all(done <= total for done, total, _ in seen)
    facts = found.calibration["layer_costs"]
    assert set(facts["alone"]) == {f"{side} {layer}" for layer in (0, 1) for side in SIDES}
    for kind in KINDS:
        assert 0 < facts["predicted"][kind] < facts["all"][kind]
    # The parts that got bits gain most: no other choice of two is predicted to leave less.
    costs = LayerCosts(
        model, wanted, measuring_sequences(
            model, tiny.tokenizer(), texts, COMPACT, general=True, length=LENGTH
        ), Checkpoint(tmp_path),
    )  # fmt: skip
    done = len(costs.known)
    gains = {
        part: sum(
            (costs.part(part)[k] - costs.part(part, more=True)[k]) / costs.whole()[k] for k in KINDS
        )
        for part in [(layer, side) for layer in (0, 1) for side in SIDES]
    }
    best = sorted(gains, key=lambda part: -gains[part])[:2]
    assert found.layer_bits == with_more(wanted, best).layer_bits
    assert done > 4  # what was measured was kept, and found again
    again_found = share_out(
        model, tiny.tokenizer(), texts, wanted, length=LENGTH, known=Checkpoint(tmp_path)
    )
    assert again_found.layer_bits == found.layer_bits


def test_calibration_shares_out_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.model()
    plain = tiny.quick_calibrate(model, COMPACT)
    recipe = COMPACT.replace(name="balanced", budget=plain.bits() + 0.26)
    found = tiny.quick_calibrate(model, recipe)
    assert sum(k + v - 4 for k, v in found.layer_bits.values()) == 1
    for index, layer in found.layers.items():
        torch.testing.assert_close(layer.key, plain.layers[index].key)
    # Nothing to share out, or nothing to measure on: all layers alike, and a word about it.
    caplog.clear()
    assert tiny.quick_calibrate(model, recipe.replace(budget=2.0)).layer_bits == {}
    assert "more than the budget of 2" in caplog.text
    long = recipe.replace(sink=100, recent=200, budget=9.0)
    assert share_out(
        model, tiny.tokenizer(), ["a b"], Artifact(found.model, long, found.layers), general=False
    ).layer_bits == {}  # fmt: skip
    assert "no document has the 900 tokens" in caplog.text


def test_other_bits_from_the_same_fit(artifact: Artifact) -> None:
    """Transforms of 3 bits are those of 2 but for what reads two digits; and back again."""
    fitted = tiny.quick_calibrate(tiny.model(), COMPACT.replace(key_bits=3, value_bits=3))
    made = artifact.with_bits({0: (3, 3), 1: (2, 2)})
    assert made.layer_bits == {0: (3, 3)}
    for name, tensor in fitted.layers[0].tensors().items():
        if name != "errors":
            torch.testing.assert_close(getattr(made.layers[0], name), tensor)
    assert made.layers[0].errors.isnan().all()
    assert not made.layers[1].errors.isnan().any()
    back = made.with_bits({})
    assert not back.mixed
    torch.testing.assert_close(back.layers[0].query, artifact.layers[0].query)
    with pytest.raises(ArtifactError, match="layer 1: keys were fitted for 2 bits, and those of 4"):
        artifact.with_bits({1: (4, 2)})
    plain = tiny.quick_calibrate(tiny.model(), COMPACT.unrefined)
    assert plain.with_bits({1: (4, 4)}).layer_recipe(1).key_bits == 4


def test_a_mixed_artifact(artifact: Artifact, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fidelity, "FIRST_SCORED", 40)
    monkeypatch.setattr(fidelity, "LOGITS_BLOCK", 16)
    mixed = artifact.with_bits({0: (3, 2), 1: (2, 4)})
    assert mixed.layer_recipe(0).key_bits == 3
    codes = (3 + 2 + 2 + 4) / 4
    assert mixed.history_bits == pytest.approx(codes + 8 / 32)

    path = tmp_path / "mixed.safetensors"
    save_artifact(mixed, path)
    again_read = load_artifact(path)
    assert again_read.layer_bits == mixed.layer_bits
    assert summarise(again_read).bits[131072] == pytest.approx(mixed.bits())
    assert [(x.key_bits, x.value_bits) for x in summarise(again_read).layers] == [(3, 2), (2, 4)]
    assert [again_read.layer_recipe(layer).refined for layer in (0, 1)] == [True, True]

    # The packed cache holds each layer with its own bits, and reads them back.
    model = tiny.model()
    cache = OscarCache(model, again_read, strict=True)
    widths = [layer.store.layout.bytes for layer in cache._packed]
    assert widths[0] != widths[1]
    subjects = {"packed": again_read, "simulated": simulate_artifact(again_read, model.device)}
    result = measure_fidelity(
        model, tiny.tokenizer(), [tiny.text(700, seed=5)], subjects, length=LENGTH, windows=2
    )
    kl = {name: score.kl for name, score in result.recipes.items()}
    assert kl["packed"] == pytest.approx(kl["simulated"], rel=0.05)
    ids = tiny.tokens(1, 60)
    whole = tiny.decode_logits(model, ids, OscarCache(model, again_read, strict=True), 60)
    steps = tiny.decode_logits(model, ids, OscarCache(model, again_read, strict=True), 1)
    torch.testing.assert_close(whole, steps, atol=2e-3, rtol=2e-3)


def test_refusals(artifact: Artifact) -> None:
    for bits, message in (((5, 2), r"layer 0: .* bits; use 2, 3 or 4"),):
        with pytest.raises(ArtifactError, match=message):
            Artifact(artifact.model, artifact.recipe, artifact.layers, layer_bits={0: bits})
    with pytest.raises(ArtifactError, match="bits of layer 7, which has no transforms"):
        Artifact(artifact.model, artifact.recipe, artifact.layers, layer_bits={7: (3, 2)})
    with pytest.raises(RecipeError, match="a budget is for codes by least squares"):
        Recipe.named("paper", budget=2.5)
    with pytest.raises(RecipeError, match="a budget is for codes by least squares"):
        Recipe.named("bf16", budget=2.5)
