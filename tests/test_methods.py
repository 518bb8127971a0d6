"""Presets say what they claim, and one file is enough to add a method."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import generator

from oscarkv import methods
from oscarkv.calibration.fit import fit_layer
from oscarkv.calibration.statistics import AttentionCall, LayerStatistics
from oscarkv.errors import RecipeError
from oscarkv.methods import get_transform, needs, presets
from oscarkv.methods.common import per_layer
from oscarkv.recipe import Recipe

DIM, HEADS, LENGTH = 32, 2, 40


@pytest.fixture(scope="module")
def statistics() -> LayerStatistics:
    rng = generator(0)
    spread = torch.logspace(0, -1, DIM)
    q = torch.randn(4, LENGTH, DIM, generator=rng) * spread
    k, v = torch.randn(2, HEADS, LENGTH, DIM, generator=rng) * spread.flip(0)
    weights = torch.softmax(q @ k.repeat_interleave(2, 0).mT, -1)
    call = AttentionCall(q, k, v, weights @ v.repeat_interleave(2, 0), DIM**-0.5)
    collected = LayerStatistics(0, sink=2, recent=4, pairs=True)
    collected.observe(call, rng)
    collected.observe_scores(call)
    return collected


def test_the_paper_presets_are_the_published_ones() -> None:
    paper = Recipe.named("paper")
    assert (paper.sink, paper.recent) == (64, 256)
    assert (paper.key_clip, paper.value_clip) == (0.96, 0.92)
    assert (paper.key_transform, paper.value_transform, paper.composition) == (
        "rotation",
        "rotation",
        "UHP",
    )
    assert (paper.key_target, paper.value_target) == ("queries", "diag-scores")
    assert (paper.group_size, paper.parameter_format(128)) == (None, "fp16")
    assert not paper.per_head
    assert not paper.center
    assert not paper.average_positions
    assert paper.fit == "minmax"
    changed = {"name": "paper-softmax", "value_target": "softmax", "group_size": 64}
    assert Recipe.named("paper-softmax") == paper.replace(**changed)
    assert Recipe.named("paper-per-head") == paper.replace(name="paper-per-head", per_head=True)


def test_the_presets_are_these() -> None:
    ours = {"balanced", "compact", "uniform", "precise", "retrieval"}
    published = {"paper", "paper-softmax", "paper-per-head"}
    assert set(presets()) >= ours | published | {"naive-int2", "quarot-int2", "bf16"}
    assert presets()["uniform"] == Recipe()
    assert presets()["bf16"].exact
    assert len({(p.sink, p.recent) for p in presets().values()}) == 1  # compared like with like


def test_what_each_preset_needs_to_see() -> None:
    wanted = {name: needs(recipe) for name, recipe in presets().items()}
    assert wanted["bf16"] == wanted["naive-int2"] == wanted["quarot-int2"] == frozenset()
    assert wanted["paper"] == {"moments", "scores"}
    assert wanted["paper-softmax"] == {"moments"}
    assert wanted["balanced"] == wanted["compact"] == {"moments", "pairs"}


@pytest.mark.parametrize("name", sorted(set(presets()) - {"bf16"}))
def test_every_preset_fits_a_layer(name: str, statistics: LayerStatistics) -> None:
    recipe = Recipe.named(name, sink=2, recent=4, group_size=None)
    layer = fit_layer(statistics, recipe)
    eye = torch.eye(DIM).expand(HEADS, DIM, DIM)
    assert layer.inverse_errors(recipe)["key"] < 1e-4
    torch.testing.assert_close(layer.value @ layer.value_inverse, eye, atol=1e-4, rtol=0)
    assert bool((layer.key_mean != 0).any()) == recipe.center


def test_layer_shared_rotations_are_equal_and_per_head_ones_are_not(statistics) -> None:
    shared, own = (
        get_transform("rotation").fit(statistics, "key", Recipe.named(name))
        for name in ("paper", "paper-per-head")
    )
    assert torch.equal(shared[0], shared[1])
    assert not torch.allclose(own[0], own[1])
    mixed = per_layer(torch.stack([torch.eye(2), 3 * torch.eye(2)]), per_head=False)
    assert torch.equal(mixed[1], 2 * torch.eye(2))


@pytest.mark.parametrize("target", ["diag-scores", "softmax", "values"])
def test_value_targets_differ(target: str, statistics: LayerStatistics) -> None:
    recipe = Recipe.named("paper", value_target=target, composition="U")
    rotation = get_transform("rotation").fit(statistics, "value", recipe)
    moment = {
        "diag-scores": statistics.scored_values,
        "softmax": statistics.outputs,
        "values": statistics.values,
    }[target].second_moment.mean(0)
    turned = rotation[0].T @ moment @ rotation[0]
    off_diagonal = turned - turned.diagonal().diag()
    assert float(off_diagonal.abs().max()) < 1e-10 * float(moment.trace())


# -- a new method --------------------------------------------------------------------------------

NEW_METHOD = '''
"""Reverses the channels."""
import torch
from oscarkv.methods import transform
from oscarkv.recipe import Recipe

PRESETS = (
    Recipe(
        name="reversed",
        key_transform="{name}",
        value_transform="identity",
        refine_keys=False,
    ),
)


@transform("reversal", needs=("moments",))
def fit(statistics, side, recipe):
    heads, dim = statistics.shape
    return torch.eye(dim, dtype=torch.float64).flip(0).expand(heads, dim, dim)
'''


@pytest.fixture
def add_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts one more file into the methods folder, for the length of a test."""

    def add(text: str) -> None:
        (tmp_path / "reversal.py").write_text(text)
        monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
        monkeypatch.setattr(methods, "_TRANSFORMS", dict(methods._TRANSFORMS))
        methods._load.cache_clear()

    presets()
    yield add
    monkeypatch.undo()
    methods._load.cache_clear()
    sys.modules.pop("oscarkv.methods.reversal", None)


def test_one_file_adds_a_method(add_method, statistics: LayerStatistics) -> None:
    add_method(NEW_METHOD.format(name="reversal"))
    recipe = Recipe.named("reversed", sink=2, recent=4)
    assert needs(recipe) >= {"moments"}
    layer = fit_layer(statistics, recipe)
    assert torch.equal(layer.key[0], torch.eye(DIM).flip(0))
    assert "balanced" in presets()


def test_a_preset_with_an_unknown_transform_is_refused(add_method) -> None:
    add_method(NEW_METHOD.format(name="reverse"))
    with pytest.raises(RecipeError, match="'reversed' names an unknown transform 'reverse'"):
        presets()


def test_an_unknown_transform_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        RecipeError, match="unknown transform 'svd'; known: balanced, block-hadamard, hadamard"
    ):
        get_transform("svd")
