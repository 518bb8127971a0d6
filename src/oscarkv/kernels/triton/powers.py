"""Powers of two, in which decode's kernels hold logits and take scales out of numbers."""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1.0e30)  # the exponent of a sum of nothing
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(logits, soft_cap, SOFT_CAP: tl.constexpr):
    """Powers of two from logits: with a soft cap in nature's units, without one in these."""
    if SOFT_CAP:
        turned = tl.exp2(logits * (2.0 * LOG2E / soft_cap))
        logits = soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + turned))
    return logits


@triton.jit
def power_of_two(exponent):
    """2^exponent, from -126 to 127, by the bits of fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
