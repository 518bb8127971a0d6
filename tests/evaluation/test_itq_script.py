"""scripts/itq.py: what it learns is a rotation, and what reads the codes turns with it."""

from types import ModuleType

import pytest
import torch
from helpers import generator
from script_modules import load_script
from torch import Tensor

from oscarkv.artifact import LayerTransforms
from oscarkv.calibration.fit import fit_layer
from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.recipe import Recipe

HEADS, DIM, TOKENS = 2, 64, 500
RECIPE = Recipe.named("quarot-int2").replace(fit="least-squares")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("itq")


@pytest.fixture(scope="module")
def layer() -> LayerTransforms:
    return fit_layer(LayerStatistics.blank(0, HEADS, DIM, torch.device("cpu")), RECIPE)


def rows(seed: int) -> Tensor:
    return torch.randn(HEADS, TOKENS, DIM, generator=generator(seed))


def test_rotations_stay_within_their_blocks(script: ModuleType) -> None:
    blocks = [16, 32, 16]
    rotation = script.procrustes(rows(1), rows(2), blocks)
    eye = torch.eye(DIM).expand(HEADS, DIM, DIM)
    torch.testing.assert_close(rotation @ rotation.mT, eye, atol=1e-5, rtol=0)
    mask = torch.block_diag(*(torch.ones(size, size) for size in blocks)).bool()
    assert not rotation[:, ~mask].any()
    assert rotation[:, mask].any()


def test_a_rotation_is_found_again(script: ModuleType) -> None:
    turn = torch.linalg.qr(rows(3)[:, :DIM]).Q
    found = script.procrustes(rows(4), rows(4) @ turn, [DIM])
    torch.testing.assert_close(found, turn, atol=1e-4, rtol=0)


def test_readers_turn_with_the_codes(script: ModuleType, layer: LayerTransforms) -> None:
    turn = torch.linalg.qr(rows(5)[:, :DIM]).Q
    turned = script.turn_values(script.turn_keys(layer, turn), turn)
    x = rows(6)
    torch.testing.assert_close((x @ turned.key) @ turned.query.mT, x, atol=1e-4, rtol=0)
    torch.testing.assert_close((x @ turned.value) @ turned.value_inverse, x, atol=1e-4, rtol=0)
    assert not torch.allclose(turned.key, layer.key, atol=1e-2)


def test_what_is_learned_rounds_better(script: ModuleType, layer: LayerTransforms) -> None:
    signs = torch.where(rows(7) > 0, 1.0, -1.0)  # two values a channel: no rotation is best
    turn = torch.linalg.qr(rows(8)[:, :DIM]).Q
    x = (signs + 0.05 * rows(9)) @ turn
    _, errors = script.learn(layer, RECIPE, x, x, 30, ["keys", "values"])
    for before, after in errors.values():
        assert after < 0.8 * before
