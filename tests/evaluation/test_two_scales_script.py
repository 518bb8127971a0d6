"""scripts/two_scales.py: its passages come twice, and a changed scale is put back."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from script_modules import load_script

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations"))
import tiny

from oscarkv.codec import encode
from oscarkv.recipe import Recipe


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("two_scales")


def test_passages_come_twice_and_are_apart(script: ModuleType) -> None:
    found = script.passages_twice(range(10000), 64, 3)
    assert [tuple(x.shape) for x in found] == [(1, 64)] * 3
    for x in found:
        assert torch.equal(x[:, :32], x[:, 32:])
    assert [int(x[0, 0]) for x in found] == [5000, 5000 + 7 * 32, 5000 + 14 * 32]
    with pytest.raises(SystemExit, match="fewer than"):
        script.passages_twice(range(5010), 64, 1)


def test_another_scale_is_used_and_put_back(script: ModuleType) -> None:
    own = encode.SPLIT_SCALE
    for scale, expected in ((0.6, own | {2: 0.6}), (None, own)):
        with script.scale_of_two_digits(scale):
            assert expected == encode.SPLIT_SCALE
        assert own == encode.SPLIT_SCALE


def test_everything_that_is_named_is_measured(script: ModuleType) -> None:
    model = tiny.model()
    artifacts = {
        name: tiny.quick_calibrate(model, Recipe.named(name, **tiny.SMALL))
        for name in script.RECIPES
    }
    found = script.subjects(artifacts, model.device)
    assert list(found)[:3] == list(script.RECIPES)
    assert {scale for _, scale in found.values()} == {None, *script.SCALES}
    assert len({subject.digest for subject, scale in found.values() if scale is None}) == 9
