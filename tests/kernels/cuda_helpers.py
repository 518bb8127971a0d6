"""What the tests of the CUDA backend share."""

import math
from dataclasses import replace

import torch
from helpers import generator
from kernels.steps import Guarded, Shape, make_layer
from torch import Tensor

from oscarkv.kernels import LayerCache

HALF, BF16 = torch.float16, torch.bfloat16
#: The one that most tests use: it is compiled once.
PLAIN = Shape()


def named(shape: Shape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    refined = "-refined" if shape.recipe().refined else ""
    bits = "" if shape.bits == (2, 2) else "-{}-{}-bits".format(*shape.bits)
    stored = f"{shape.head_dim}-{shape.group_size}-{shape.parameters}-{shape.page_size}"
    return f"{stored}-{dtype}{refined}{bits}"


def blank_layer(shape: Shape, pages: int, device: torch.device, **knobs: float) -> LayerCache:
    """Unwritten pages, all bytes 0xFF, between guards."""
    recipe = replace(shape.recipe(), **knobs)
    layer = make_layer(shape, torch.Generator(device).manual_seed(1), recipe=recipe, pages=pages)
    layer.history = Guarded(torch.full_like(layer.history, 0xFF)).tensor
    layer.window = Guarded(torch.full_like(layer.window, math.nan)).tensor
    return layer


def some_slots(count: int, pages: int, size: int, device: torch.device) -> Tensor:
    """Slots of pages 1 and up, in any order."""
    return (torch.randperm((pages - 1) * size, generator=generator(2))[:count] + size).to(device)


def rng_of(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
