"""What the interpreter, or one kind of GPU, does not know, done in another way there."""

from typing import Any

import torch
import triton
import triton.language as tl

#: Whether kernels run under Triton's interpreter. Fixed when triton is first imported.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
#: Near-fp32 products of fp32 operands.
PRECISION = tl.constexpr("tf32x3" if torch.version.hip is None else "ieee")

if triton.knobs.runtime.interpret:

    def bound(x: Any) -> int:
        """A loop's bound as a plain number: NumPy 2.4 makes none of the interpreter's scalars."""
        return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)

else:

    @triton.jit
    def bound(x):
        return x


@triton.jit
def dot(a, b, acc):
    """acc + a b; fp32 operands are multiplied to nearly full precision."""
    if INTERPRETED:  # it knows no products of bf16
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc)
    return acc
