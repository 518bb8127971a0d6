"""Scale and offset of a group, as they are stored.

    fp16             s, lo            two IEEE half floats
    log8             n, z             s = 2^(e0 + n/16), lo = z s (L - 1) / 96;  n uint8, z int8
    log8-symmetric   n                s likewise, lo = -s (L - 1) / 2

L = 2^bits levels; e0 is an integer per layer, head and side, kept in the artifact and passed here
as `base` = 2^e0. For 2 bits the step of z is 1/32. The grid is a table of 256 fp32 numbers and
rounding compares with a table of bounds, so that every backend stores the same bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: The smallest scale fp16 parameters hold at full precision; a constant row gets it.
SMALLEST_FP16 = 2.0**-14
LARGEST_FP16 = 65504.0


def bases(exponents: Tensor) -> Tensor:
    """2^e0 as fp32, exactly, of int32 exponents."""
    return ((exponents.clamp(-126, 127) + 127) << 23).view(torch.float32)


def power_below(x: Tensor) -> Tensor:
    """The largest power of two not above positive normal fp32 numbers, from their bits."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once. (On CUDA, torch multiplies by the reciprocal of a plain number.)"""
    if x.device.type == "cpu":
        return x / number
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


@lru_cache(maxsize=8)
def log_grid(device: str) -> tuple[Tensor, Tensor]:
    """2^(n/16) for n = 0 .. 255, and the 255 bounds 2^((n + 1/2)/16) between them, as fp32.

    Both are 16 rounded numbers of one octave times exact powers of two.
    """
    step, octave = torch.arange(256) % 16, torch.exp2((torch.arange(256) // 16).double())
    values = torch.exp2(step.double() / 16).float().double() * octave
    bounds = torch.exp2((step.double() + 0.5) / 16).float().double() * octave
    return values.float().to(device), bounds[:255].float().to(device)


def store(
    s: Tensor, lo: Tensor, parameter_format: str, levels: int, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 s, lo [..., G] -> (bytes [..., G pb], s and lo as a reader will see them)."""
    if parameter_format == "fp16":
        half_s = s.clamp(SMALLEST_FP16, LARGEST_FP16).half()
        half_lo = lo.clamp(-LARGEST_FP16, LARGEST_FP16).half()
        packed = torch.stack([half_s, half_lo], -1).view(torch.uint8).flatten(-2)
        return packed, half_s.float(), half_lo.float()
    values, bounds = log_grid(str(s.device))
    step = (levels - 1) / 96
    if parameter_format == "log8":  # an offset beyond 127 steps needs a larger scale to be held
        s = torch.maximum(s, divide(lo.abs(), 127 * step))
    index = torch.bucketize(s / base, bounds, right=True)
    n, s = index.to(torch.uint8), values[index] * base
    if parameter_format == "log8-symmetric":
        return n, s, s * (-(levels - 1) / 2)
    z = torch.round(divide(lo / s, step)).clamp(-127, 127)
    packed = torch.stack([n, z.to(torch.int8).view(torch.uint8)], -1).flatten(-2)
    return packed, s, s * (z * step)


def load(packed: Tensor, parameter_format: str, levels: int, base: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [..., G pb] -> fp32 s, lo [..., G]; base broadcasts against [..., G]."""
    if parameter_format == "fp16":
        halves = packed.contiguous().view(torch.float16).float()
        return halves[..., 0::2], halves[..., 1::2]
    values, _ = log_grid(str(packed.device))
    if parameter_format == "log8-symmetric":
        s = values[packed.int()] * base
        return s, s * (-(levels - 1) / 2)
    s = values[packed[..., 0::2].int()] * base
    z = packed.view(torch.int8)[..., 1::2].float()
    return s, s * (z * ((levels - 1) / 96))
