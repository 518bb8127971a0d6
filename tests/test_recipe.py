"""Every knob is checked, every preset costs what it says."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscarkv.errors import RecipeError
from oscarkv.methods import presets
from oscarkv.recipe import CODE_BITS, GAINS, PARAMETER_FORMATS, REFINED_BITS, Recipe

HEAD_DIMS = [64, 80, 96, 128, 192, 256]
MINMAX = {"fit": "minmax", "key_gain": 0.0, "value_gain": 0.0}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_ours_cost_at_most_2_3_bits_at_128k(head_dim: int) -> None:
    for name in ("balanced", "compact", "uniform"):
        assert 2.0 < Recipe.named(name).bits(head_dim) <= 2.3


def test_a_budget_is_spent_in_calibration() -> None:
    balanced, compact = Recipe.named("balanced"), Recipe.named("compact")
    assert balanced.budget == 2.3
    assert balanced.uniform == compact.replace(name="balanced")
    assert balanced.bits(128) == compact.bits(128)
    assert Recipe.from_json(balanced.to_json()) == balanced


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("paper", 128, 2.284),
        ("paper", 64, 2.533),
        ("uniform", 128, 2.284),
        ("uniform", 64, 2.283),
        ("compact", 128, 2.096),
        ("compact", 64, 2.159),
        ("paper-softmax", 128, 2.533),
        ("naive-int2", 128, 2.284),
        ("bf16", 128, 16.0),
    ],
)
def test_bits_at_128k(name: str, head_dim: int, bits: float) -> None:
    assert Recipe.named(name).bits(head_dim) == pytest.approx(bits, abs=1e-3)


def test_bits_at_other_lengths_follow_the_papers_formula() -> None:
    paper = Recipe.named("paper")
    assert paper.bits(128, 32768) == pytest.approx(2.384, abs=1e-3)
    assert paper.bits(128, 8192) == pytest.approx(2.787, abs=1e-3)
    assert paper.bits(128, 100) == 16.0  # all window
    assert Recipe(key_bits=3, value_bits=4).history_bits(128) == 3.5 + 0.25


def test_compact_is_below_2_11_bits_at_head_dim_128() -> None:
    assert Recipe.named("compact").bits(128) <= 2.11


def test_auto_parameters_are_8_bit_below_head_dim_128() -> None:
    assert [Recipe().parameter_format(d) for d in (64, 96, 128, 256)] == ["log8"] * 2 + ["fp16"] * 2
    assert Recipe(parameters="fp16").parameter_format(64) == "fp16"


def test_groups_must_divide_the_head() -> None:
    assert Recipe().groups(80) == 1
    assert Recipe(group_size=32, refine_keys=False).groups(128) == 4
    with pytest.raises(RecipeError, match="group_size 32 does not divide head_dim 80"):
        Recipe(group_size=32, refine_keys=False).groups(80)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"key_bits": 5}, "key_bits is 5; choose one of 2, 3, 4, 16"),
        ({"key_bits": 16}, "both be 16, or neither"),
        ({"parameters": "fp32"}, "parameters is 'fp32'"),
        ({"group_size": 8}, "group_size is 8"),
        ({"group_size": 40}, "group_size is 40"),
        ({"sink": -1}, "sink is -1"),
        ({"recent": 2.5}, "recent is 2.5"),
        ({"recent": 0}, "the newest token is always exact"),
        ({"fit": "kmeans"}, "fit is 'kmeans'"),
        ({"key_gain": 0.6}, "key_gain is 0.6"),
        ({"key_clip": 0.96}, "key_clip needs fit='minmax'"),
        ({**MINMAX, "value_clip": 1.5}, "value_clip is 1.5"),
        ({"fit": "minmax"}, "need fit='least-squares'"),
        ({**MINMAX, "parameters": "log8-symmetric"}, "symmetric parameters need"),
        ({**MINMAX, "metric_rounding": True}, "metric_rounding needs"),
        ({"composition": "HU"}, "composition is 'HU'"),
        ({"key_target": "values"}, "key_target is 'values'"),
        ({"value_target": "keys"}, "value_target is 'keys'"),
        ({"ridge": 0.0}, "ridge is 0.0"),
        ({"center": False}, "balanced transform is fitted about the mean"),
        ({"key_transform": "hadamard"}, "key_transform is 'hadamard', which needs refine_keys=Fal"),
        (MINMAX, "fit is 'minmax', which needs refine_keys=False"),
        ({"group_size": 64}, "group_size is 64, which needs refine_keys=False"),
        ({"metric_rounding": True}, "metric_rounding is True, which needs refine_keys=False"),
        ({"split_scales": True}, "split_scales needs refine_keys and parameters='log8-symmetric'"),
    ],
)
def test_invalid_and_contradictory_knobs_are_refused(knobs: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(**knobs)
    with pytest.raises(RecipeError, match=message):
        Recipe().replace(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [{"key_transform": "hadamard"}, MINMAX, {"group_size": 64}, {"metric_rounding": True}],
)
def test_what_refined_keys_contradict_is_taken_without_them(knobs: dict) -> None:
    assert not Recipe(**knobs, refine_keys=False).refined
    assert not Recipe(**knobs, key_bits=4).refined  # keys of 4 bits never are


def test_ours_refine_keys_of_2_and_3_bits_and_no_others_do() -> None:
    ours = {"balanced", "compact", "uniform", "precise", "retrieval"}
    assert {name for name, recipe in presets().items() if recipe.refined} == ours
    assert [Recipe(key_bits=bits).refined for bits in CODE_BITS] == [True, True, False]
    even = Recipe(refine_keys=False)
    assert all(Recipe().bits(dim) == even.bits(dim) for dim in HEAD_DIMS)


def test_unknown_knobs_and_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe knob bits, sinks; knobs: name"):
        Recipe().replace(sinks=3, bits=2)
    with pytest.raises(RecipeError, match=r"unknown recipe 'papers'; known: balanced, bf16"):
        Recipe.named("papers")
    with pytest.raises(RecipeError, match="unknown recipe knob group"):
        Recipe.named("paper", group=64)


def test_recipes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().sink = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_survive_json(name: str) -> None:
    recipe = Recipe.named(name)
    assert recipe.name == name
    assert Recipe.from_json(recipe.to_json()) == recipe


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "key_bits": st.sampled_from(CODE_BITS),
            "value_bits": st.sampled_from(CODE_BITS),
            "group_size": st.sampled_from((None, 16, 64)),
            "parameters": st.sampled_from(PARAMETER_FORMATS),
            "sink": st.integers(0, 1000),
            "recent": st.integers(1, 1000),
            "key_gain": st.sampled_from(GAINS),
            "metric_rounding": st.booleans(),
            "ridge": st.floats(1e-9, 0.9),
        },
    ),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_recipe_survives_json(knobs: dict, refine: bool) -> None:
    plain = knobs.get("group_size") is None and not knobs.get("metric_rounding")
    knobs["refine_keys"] = refine and (plain or knobs.get("key_bits", 2) not in REFINED_BITS)
    recipe = Recipe(**knobs)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert all(getattr(again, knob) == value for knob, value in knobs.items())


@pytest.mark.parametrize("text", ["{", "[1]", '"paper"', '{"sinks": 3}', '{"key_bits": 9}'])
def test_broken_json_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        Recipe.from_json(text)


def test_json_names_every_knob() -> None:
    knobs = json.loads(Recipe().to_json())
    assert sorted(knobs) == sorted(field.name for field in dataclasses.fields(Recipe))
