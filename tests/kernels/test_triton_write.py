"""Triton writes: the bytes of the oracle from the transformed row on, and close to them before."""

import pytest
import torch
from helpers import generator, make_layer
from kernels.triton_helpers import (
    COMPILED,
    assert_codes_at_thresholds,
    hard_rows,
    moved,
    without_transforms,
)

from oscarkv.kernels import LayerCache
from oscarkv.kernels.torch_backend import TorchBackend
from oscarkv.recipe import Recipe

pytest.importorskip("triton")
from oscarkv.kernels.triton.backend import TritonBackend

PLAIN = {"refine_keys": False}
SPLIT = {"split_scales": True}
MINMAX = {"fit": "minmax", "key_gain": 0.0, "value_gain": 0.0, **PLAIN}
GEOMETRIES = [  # head_dim, key bits, value bits, format, group size, others
    (64, 2, 2, "log8", None, PLAIN),
    (64, 2, 2, "log8-symmetric", None, {}),
    (64, 2, 2, "log8-symmetric", None, SPLIT),
    (80, 2, 2, "log8-symmetric", None, {"key_gain": 1.0, **SPLIT}),
    (64, 4, 3, "fp16", 32, {}),
    (64, 2, 4, "log8", None, {**MINMAX, "key_clip": 0.96, "value_clip": 0.92}),
    (80, 2, 3, "log8", None, {"key_gain": 0.25, **PLAIN}),
    (80, 2, 2, "log8", None, {"key_gain": 0.25}),
    (80, 3, 4, "log8-symmetric", 16, PLAIN),
    (80, 3, 2, "log8-symmetric", None, {}),
    (64, 3, 2, "log8", None, {}),
    (64, 3, 2, "log8-symmetric", None, SPLIT),
    (80, 4, 2, "fp16", None, {**MINMAX, "key_clip": 0.9}),
    (96, 3, 2, "fp16", None, {"value_gain": 0.0}),
    (96, 3, 3, "log8-symmetric", None, SPLIT),
    COMPILED((96, 2, 4, "log8", 32, PLAIN)),
    COMPILED((96, 2, 3, "log8-symmetric", None, {})),
    COMPILED((128, 2, 2, "fp16", None, PLAIN)),
    COMPILED((128, 2, 2, "fp16", None, {})),
    (128, 2, 2, "log8-symmetric", None, {"key_gain": 0.5, **PLAIN}),
    (128, 2, 2, "log8", None, {"key_gain": 1.0}),
    COMPILED((128, 2, 2, "log8-symmetric", None, SPLIT)),
    (192, 2, 3, "log8-symmetric", None, SPLIT),
    (128, 3, 3, "log8", 64, PLAIN),
    COMPILED((128, 3, 2, "log8-symmetric", None, SPLIT)),
    (128, 2, 2, "fp16", 32, MINMAX),
    (128, 4, 4, "log8-symmetric", 32, {}),
    (192, 2, 3, "log8", None, PLAIN),
    (192, 2, 2, "log8", None, {}),
    (192, 4, 2, "fp16", 64, {}),
    (256, 2, 2, "fp16", None, PLAIN),
    (256, 2, 4, "fp16", None, {"key_gain": 0.0}),
    (256, 3, 4, "log8", 128, PLAIN),
    (256, 3, 2, "fp16", None, {}),
]


def written(
    layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slots, window_slots, device
) -> LayerCache:
    layer = moved(layer, device)
    arguments = (x.to(device) for x in (k, v, slots, window_slots))
    TritonBackend().write(*arguments, layer)
    return moved(layer, torch.device("cpu"))


def some_slots(count: int, pages: int, size: int, seed: int) -> torch.Tensor:
    """Slots of pages 1 and up, in any order."""
    return torch.randperm((pages - 1) * size, generator=generator(seed))[:count] + size


def recipe_of(geometry) -> tuple[int, Recipe]:
    dim, key_bits, value_bits, stored, group_size, others = geometry
    knobs = {"key_bits": key_bits, "value_bits": value_bits, "parameters": stored}
    return dim, Recipe(**knobs, group_size=group_size, **others)


def named(geometry) -> str:
    recipe = recipe_of(geometry)[1]
    return "-".join(map(str, geometry[:5])) + "-refined" * recipe.refined + "-split" * recipe.split


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=named)
def test_equal_rows_give_equal_bytes(geometry, device: torch.device) -> None:
    dim, recipe = recipe_of(geometry)
    layer = without_transforms(make_layer(recipe, dim, page_size=16, pages=3))
    k, v = hard_rows(18, 2, dim, dim)
    slots, window_slots = some_slots(18, 3, 16, 1), some_slots(18, 3, 16, 2)
    slots[9] = window_slots[5] = -1
    window_slots[6] = 3  # page 0: nothing is written
    ours = written(layer, k, v, slots, window_slots, device)
    TorchBackend().write(k, v, slots, window_slots, layer)
    names = ("K codes", "V codes", "K parameters", "V parameters")
    sections = zip(
        names,
        layer.layout.sections(ours.history),
        layer.layout.sections(layer.history),
        strict=True,
    )
    for name, mine, theirs in sections:
        assert torch.equal(mine, theirs), name
    assert torch.equal(ours.history, layer.history)  # the padding too
    assert torch.equal(ours.window, layer.window)


@pytest.mark.parametrize(
    ("dim", "dtype", "recipe"),
    [
        (80, torch.float32, Recipe(**PLAIN)),
        (80, torch.bfloat16, Recipe()),
        (80, torch.float16, Recipe()),
        (128, torch.float32, Recipe()),
        COMPILED(128, torch.bfloat16, Recipe()),
        (128, torch.float16, Recipe(**PLAIN)),
        (64, torch.bfloat16, Recipe.named("precise")),
        (96, torch.float16, Recipe.named("precise")),
    ],
)
def test_codes_differ_from_the_oracle_only_at_thresholds(
    dim: int, dtype: torch.dtype, recipe: Recipe, device: torch.device
) -> None:
    layer = make_layer(recipe, dim, page_size=16, pages=4)
    layer.window = layer.window.to(dtype)
    k, v = torch.randn(2, 48, 2, dim, generator=generator(dim)).to(dtype)
    slots = some_slots(48, 4, 16, 3)
    ours = written(layer, k, v, slots, slots, device)
    TorchBackend().write(k, v, slots, slots, layer)
    assert torch.equal(ours.window, layer.window)
    assert_codes_at_thresholds(ours, layer, k, v, slots)


@pytest.mark.parametrize("key_bits", [COMPILED(3), 2])
def test_a_chunk_and_single_tokens_write_the_same_bytes(
    key_bits: int, device: torch.device
) -> None:
    layer = moved(make_layer(Recipe(key_bits=key_bits), 64, pages=3), device)
    single = moved(layer, device)
    k, v = torch.randn(2, 19, 2, 64, generator=generator(1)).to(device)
    slots = some_slots(19, 3, 16, 1).to(device)
    backend = TritonBackend()
    backend.write(k, v, slots, slots, layer)
    for i in (0, 7, 15, 16, 18):
        one = slice(i, i + 1)
        backend.write(k[one], v[one], slots[one], slots[one], single)
    for i in (0, 7, 15, 16, 18):
        page, offset = int(slots[i]) // 16, int(slots[i]) % 16
        for mine, theirs in zip(
            layer.layout.sections(layer.history), layer.layout.sections(single.history), strict=True
        ):
            assert torch.equal(mine[page, :, offset], theirs[page, :, offset])
    assert bool(single.history[1:].any())


@pytest.mark.parametrize("metric", [False, True])
def test_slot_minus_one_writes_nothing(metric: bool, device: torch.device) -> None:
    layer = make_layer(Recipe(metric_rounding=metric, refine_keys=not metric), 64, pages=3)
    layer.history.fill_(0xFF)
    layer.window.view(torch.uint8).fill_(0xFF)
    k, v = torch.randn(2, 4, 2, 64, generator=generator(4))
    k[0] = v[2] = float("nan")  # padding may hold anything
    history_slots, window_slots = torch.tensor([-1, 20, -1, 33]), torch.tensor([-1, 17, -1, -1])
    ours = written(layer, k, v, history_slots, window_slots, device)
    touched = torch.zeros(3, 16, dtype=torch.bool)
    for section in ours.layout.sections(ours.history):
        touched |= (section != 0xFF).any(-1).any(1)
    assert touched.nonzero().tolist() == [[1, 4], [2, 1]]
    exact = (ours.window.view(torch.uint8) != 0xFF).any(-1).any(2).any(1)
    assert exact.nonzero().tolist() == [[1, 1]]
    nowhere = torch.full((4,), -1)
    assert torch.equal(written(layer, k, v, nowhere, nowhere, device).history, layer.history)
    empty = torch.zeros(0, 2, 64)
    written(layer, empty, empty, nowhere[:0], nowhere[:0], device)


def test_strided_rows_and_pools(device: torch.device) -> None:
    """Keys and values as slices of one projection; pages of several layers in one pool."""
    layer = make_layer(Recipe(), 64, page_size=48, pages=3)
    both = torch.randn(5, 3, 2, 128, generator=generator(5))
    k, v = both[:, :2, 0, :64], both[:, 1:, 1, 64:]
    slots = torch.tensor([48, 95, 96, 143, 70])
    ours = moved(layer, device)
    pool = torch.zeros(3, 2, 2, layer.layout.bytes, dtype=torch.uint8, device=device)
    ours.history = pool[:, 1]
    TritonBackend().write(
        *(both.to(device)[:, i : i + 2, i, 64 * i : 64 * i + 64] for i in (0, 1)),
        slots.to(device),
        torch.full((5,), -1, device=device),
        ours,
    )
    TorchBackend().write(k, v, slots, torch.full((5,), -1), layer)
    agree = (pool[:, 1].cpu() == layer.history).float().mean()
    assert float(agree) > 0.99
    assert not bool(pool[:, 0].any())
