"""Parts of a subject by themselves, and the parts of a measurement that survive an interruption."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from integrations import tiny

from oscarkv import Recipe
from oscarkv.errors import OscarError
from oscarkv.evaluation import fidelity
from oscarkv.evaluation.checkpoint import FILE, Checkpoint
from oscarkv.evaluation.fidelity import measure_fidelity
from oscarkv.evaluation.prepare import prepare
from oscarkv.evaluation.sensitivity import measure_sensitivity
from oscarkv.evaluation.subjects import Packed, Simulated, simulate_artifact
from oscarkv.methods import named

LENGTH, FIRST = 96, 40
TEXTS = [tiny.text(700, seed=5)]


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score short windows."""
    monkeypatch.setattr(fidelity, "FIRST_SCORED", FIRST)
    monkeypatch.setattr(fidelity, "LOGITS_BLOCK", 16)


def subject(model: Any, name: str = "naive-int2") -> Simulated:
    artifact = tiny.quick_calibrate(model, Recipe.named(name, **tiny.SMALL))
    return simulate_artifact(artifact, model.device)


def measured(model: Any, subjects: dict[str, Any], **options: Any) -> Any:
    knobs: dict[str, Any] = {"length": LENGTH, "windows": 2} | options
    return measure_fidelity(model, tiny.tokenizer(), TEXTS, subjects, **knobs)


def test_simulated_and_packed_have_the_same_figures() -> None:
    model = tiny.model()
    artifact = tiny.quick_calibrate(model, Recipe.named("uniform", **tiny.SMALL))
    both = {"packed": Packed(artifact), "simulated": simulate_artifact(artifact, model.device)}
    result = measured(model, both)
    packed, simulated = result.recipes["packed"], result.recipes["simulated"]
    assert simulated.kl == pytest.approx(packed.kl, rel=0.02)
    assert simulated.bits_128k == pytest.approx(packed.bits_128k)
    assert (packed.simulated, simulated.simulated) == (False, True)
    for layer, error in packed.layer_errors.items():
        assert simulated.layer_errors[layer] == pytest.approx(error, rel=0.02)


def test_parts_of_a_subject() -> None:
    model = tiny.model()
    whole = subject(model)
    found = measure_sensitivity(
        model,
        tiny.tokenizer(),
        TEXTS,
        whole,
        parts=["sides", "layers", "heads"],
        length=LENGTH,
        windows=2,
    )
    # all, keys, values; two sides of two layers; two layers of two heads
    assert len(found.parts) == 3 + 4 + 4
    keys, values = found.of(sides="keys"), found.of(sides="values")
    assert 0 < keys < found.of()
    assert 0 < values < found.of()
    alone = measured(model, {"x": whole.part(layers=[1], sides=["values"])}).recipes["x"].kl
    assert found.of(sides="values", layer=1) == pytest.approx(alone)
    heads = {(p.layer, p.head): p.kl for p in found.parts if p.head is not None}
    both = measured(model, {"x": whole.part(layers=[0])}).recipes["x"].kl
    assert all(0 < heads[0, head] < 2 * both for head in (0, 1))
    nothing = measured(model, {"x": whole.part(layers=[])}).recipes["x"].kl
    assert abs(nothing) < 1e-6


def test_positions_and_paired_differences() -> None:
    model = tiny.model()
    worse, better = subject(model), subject(model, "uniform")
    result = measured(model, {"worse": worse, "better": better}, windows=3)
    assert result.paired_with == "worse"
    first, second = result.recipes["worse"], result.recipes["better"]
    assert (first.kl_difference, first.kl_difference_se) == (0, 0)
    expected = [b - a for a, b in zip(first.kl_by_window, second.kl_by_window, strict=True)]
    assert second.kl_difference == pytest.approx(sum(expected) / 3)
    assert second.kl_difference < 0
    ranges = [(p.start, p.stop) for p in second.kl_by_position]
    assert ranges[0][0] == FIRST
    assert ranges[-1][1] == LENGTH - 1
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    total = sum((p.stop - p.start) * p.kl for p in second.kl_by_position)
    assert total / (LENGTH - 1 - FIRST) == pytest.approx(second.kl)


def test_simulated_methods_are_measured_beside_recipes(tmp_path: Path) -> None:
    model = tiny.model()
    wanted = [named(n) for n in ("kivi-2bit", "kvquant-3bit", "naive-int2-alone", "uniform")]
    subjects = prepare(
        model, tiny.tokenizer(), wanted, [tiny.text(4000)], tokens=1500, length=500, keep=tmp_path
    )
    assert list(subjects) == [each.name for each in wanted]
    assert isinstance(subjects["kivi-2bit"], Simulated)
    assert isinstance(subjects["naive-int2-alone"], Packed)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    again = prepare(  # from the directory
        model, tiny.tokenizer(), wanted, [tiny.text(4000)], tokens=1500, length=500, keep=tmp_path
    )
    assert again["uniform"].digest == subjects["uniform"].digest
    assert again["kvquant-3bit"].digest == subjects["kvquant-3bit"].digest
    with pytest.raises(OscarError, match="measured strictly only"):
        measured(model, {"k": subjects["kivi-2bit"]}, strict=False)
    with pytest.raises(OscarError, match=r"'kvquant-3bit' is fitted to text; give some with"):
        prepare(model, tiny.tokenizer(), [named("kvquant-3bit")], [])


# -- going on after an interruption --------------------------------------------------------------


def test_what_is_finished_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    subjects = {"naive": subject(model), "uniform": subject(model, "uniform")}

    class Stop(Exception):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if done == 5:  # both in the first window, the first in the second
            raise Stop

    with pytest.raises(Stop):
        measured(model, subjects, progress=stop, checkpoint=Checkpoint(tmp_path))
    lines = (tmp_path / FILE).read_text().splitlines()
    assert len(lines) == 5  # two losses and three scores
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "cut o')  # by a crash

    calls = []
    real = fidelity._score
    monkeypatch.setattr(fidelity, "_score", lambda *a: calls.append(1) or real(*a))
    resumed = measured(model, subjects, checkpoint=Checkpoint(tmp_path))
    assert len(calls) == 1
    assert resumed == measured(model, subjects)
    calls.clear()
    assert measured(model, subjects, checkpoint=Checkpoint(tmp_path)) == resumed
    assert not calls
    # Another length, another text or another recipe is another measurement.
    measured(model, {"x": subject(model, "quarot-int2")}, checkpoint=Checkpoint(tmp_path))
    measured(model, subjects, length=80, checkpoint=Checkpoint(tmp_path))
    assert len(calls) == 2 + 4


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("not JSON\n")
    with pytest.raises(OscarError, match="is damaged; delete it to measure everything again"):
        Checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarError, match="cannot keep finished work in"):
        Checkpoint(tmp_path / "file")


def test_checkpoint_values_are_json(tmp_path: Path) -> None:
    store = Checkpoint(tmp_path)
    store["a"] = {"x": [1.5, None]}
    assert json.loads((tmp_path / FILE).read_text()) == {"key": "a", "value": {"x": [1.5, None]}}
    assert Checkpoint(tmp_path)["a"] == {"x": [1.5, None]}
    assert len(Checkpoint()) == 0
