"""A block of keys and values in prefill: its products, the running softmax, the sum of values."""

import triton
import triton.language as tl

from oscarkv.kernels.triton.portable import dot

LOWEST = tl.constexpr(-1e30)  # of the running maximum: finite, so that differences are no NaN
_HEADROOM = tl.constexpr(12.0)  # weights are p 2^12: more of them are normal fp16 numbers


@triton.jit
def _reciprocal(x, ASM: tl.constexpr):
    if ASM:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = 1.0 / x
    return result


@triton.jit
def _weigh(
    raw, rate, shift, seen, maximum, total, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Raw products [rows, keys] -> the weights, and the running maximum, sum and rescaling.

    A row's logit, as a power of two, is raw * rate + shift, all of it times 2 / cap before a cap.
    """
    if CAPPED:  # tanh x = 1 - 2 / (1 + e^2x), e^2x from here as a power of two
        grown = 1.0 + tl.exp2(raw * rate[:, None] + shift[:, None])
        raw = cap - (2.0 * cap) * _reciprocal(grown, ASM)
    if MASKED:
        raw = tl.where(seen, raw, float("-inf"))
    highest = tl.max(raw, 1)
    if CAPPED:
        highest = tl.maximum(maximum, highest)
        weights = tl.exp2(raw - (highest - _HEADROOM)[:, None])
    else:
        highest = tl.maximum(maximum, highest * rate + shift)
        weights = tl.exp2(raw * rate[:, None] + (shift - highest + _HEADROOM)[:, None])
    fade = tl.exp2(maximum - highest)
    return weights, highest, total * fade + tl.sum(weights, 1), fade


@triton.jit
def attend(
    queries, keys, values, rate, shift, seen, maximum, total, acc, cap, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block of keys and values [n, d]."""
    raw = dot(queries, tl.trans(keys), None)
    weights, maximum, total, fade = _weigh(
        raw, rate, shift, seen, maximum, total, cap, CAPPED, MASKED, ASM
    )
    return maximum, total, dot(weights.to(values.dtype), values, acc * fade[:, None])
