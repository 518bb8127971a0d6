"""Scale and offset of a group, as they are stored.

    fp16             s, lo            two IEEE half floats
    log8             n, z             s = 2^(e0 + n/16), lo = z s (L - 1) / 96;  n uint8, z int8
    log8-symmetric   n                s likewise, lo = -s (L - 1) / 2

L = 2^bits levels; e0 is an integer per layer, head and side, kept in the artifact. For 2 bits the
step of z is 1/32. Rounding is exact arithmetic on fp32 bit patterns, so that every backend stores
the same bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: The smallest scale fp16 parameters hold at full precision; a constant row gets it.
SMALLEST_FP16 = 2.0**-14
LARGEST_FP16 = 65504.0


def exponent(x: Tensor) -> Tensor:
    """floor(log2 x) of positive normal fp32 numbers, from their bits."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(e: Tensor) -> Tensor:
    """2^e as fp32, exactly; e is clamped to the normal range."""
    return ((e.int().clamp(-126, 127) + 127) << 23).view(torch.float32)


@lru_cache(maxsize=8)
def _log_table(device: str) -> tuple[Tensor, Tensor]:
    steps = torch.arange(16, dtype=torch.float64)
    values = torch.exp2(steps / 16).float().to(device)
    bounds = torch.exp2((steps + 0.5) / 16).float().to(device)
    return values, bounds


def _log_scale(n: Tensor, e0: Tensor) -> Tensor:
    n = n.int()
    values, _ = _log_table(str(n.device))
    return values[n & 15] * power_of_two(e0 + (n >> 4))


def _round_log_scale(s: Tensor, e0: Tensor) -> Tensor:
    """The n whose scale is nearest to s on the logarithmic grid."""
    _, bounds = _log_table(str(s.device))
    s = s.clamp_min(torch.finfo(torch.float32).tiny)
    e = exponent(s)
    mantissa = s * power_of_two(-e)
    step = (mantissa.unsqueeze(-1) >= bounds).sum(-1, dtype=torch.int32)
    return (16 * (e - e0) + step).clamp(0, 255).to(torch.uint8)


def store(
    s: Tensor, lo: Tensor, parameter_format: str, levels: int, e0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 s, lo [..., G] -> (bytes [..., G pb], s and lo as a reader will see them)."""
    if parameter_format == "fp16":
        half_s = s.clamp(SMALLEST_FP16, LARGEST_FP16).half()
        half_lo = lo.clamp(-LARGEST_FP16, LARGEST_FP16).half()
        packed = torch.stack([half_s, half_lo], -1).view(torch.uint8).flatten(-2)
        return packed, half_s.float(), half_lo.float()
    step = (levels - 1) / 96
    if parameter_format == "log8":  # an offset beyond 127 steps needs a larger scale to be held
        s = torch.maximum(s, lo.abs() / (127 * step))
    n = _round_log_scale(s, e0)
    stored_s = _log_scale(n, e0)
    if parameter_format == "log8-symmetric":
        return n, stored_s, stored_s * (-(levels - 1) / 2)
    z = torch.round(lo / stored_s / step).clamp(-127, 127).to(torch.int8)
    packed = torch.stack([n, z.view(torch.uint8)], -1).flatten(-2)
    return packed, stored_s, stored_s * (z.float() * step)


def load(packed: Tensor, parameter_format: str, levels: int, e0: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [..., G pb] -> fp32 s, lo [..., G]; e0 broadcasts against [..., G]."""
    if parameter_format == "fp16":
        halves = packed.contiguous().view(torch.float16).float()
        return halves[..., 0::2], halves[..., 1::2]
    if parameter_format == "log8-symmetric":
        s = _log_scale(packed, e0)
        return s, s * (-(levels - 1) / 2)
    s = _log_scale(packed[..., 0::2], e0)
    z = packed[..., 1::2].contiguous().view(torch.int8).float()
    return s, s * (z * ((levels - 1) / 96))
