"""What the kernels are compared with: BF16 attention of PyTorch, and what the memory can do.

The best BF16 kernel is whichever of cuDNN's and flash attention is faster, over dense contiguous
keys and values. For one query token a sequence, the query heads of a KV head can also be passed as
rows of one head, which some kernels do faster; that counts as well.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oscarkv.benchmark.cases import Case
from oscarkv.benchmark.synthetic import element_type
from oscarkv.benchmark.timing import Call, Timing, measure, sets_needed

KERNELS = {
    "cuDNN SDPA": SDPBackend.CUDNN_ATTENTION,
    "flash SDPA": SDPBackend.FLASH_ATTENTION,
}


@dataclass(frozen=True)
class Baseline:
    """A way to do the case's attention in BF16. `whole`: it does all of it, and counts."""

    name: str
    whole: bool = True
    timing: Timing | None = None
    reason: str = ""  # why it has no time


def best(tried: list[Baseline]) -> Baseline | None:
    """The fastest that does the whole case."""
    timed = [(b.timing.median, i) for i, b in enumerate(tried) if b.timing and b.whole]
    return tried[min(timed)[1]] if timed else None


def time_baselines(case: Case, device: torch.device) -> list[Baseline]:
    """Every way there is, timed. A way that does not work here says why."""
    if case.dense:
        return []
    try:
        count = sets_needed(case.dense_bytes, device)
        tensors = [_dense(case, device) for _ in range(count)]
        found = []
        for name, whole, attend in _ways(case, device):
            calls: list[Call] = [partial(attend, *qkv) for qkv in tensors]
            found.append(_timed(name, whole, calls, device))
        return found
    except torch.OutOfMemoryError:
        size = f"{case.dense_bytes / 1e9:.1f} GB"
        return [Baseline("SDPA", reason=f"out of memory: {size} of dense keys and values")]


def _timed(name: str, whole: bool, calls: list[Call], device: torch.device) -> Baseline:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error says it again
            return Baseline(name, whole, measure(calls, device))
    except torch.OutOfMemoryError:
        return Baseline(name, whole, reason="out of memory")
    except RuntimeError as error:  # what SDPA raises if the one kernel allowed cannot do it
        return Baseline(name, whole, reason=" ".join(str(error).split())[:200])


def _dense(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = len(case.lengths), max(case.lengths)

    def tensor(heads: int, tokens: int) -> Tensor:
        shape = (batch, heads, tokens, case.head_dim)
        return torch.empty(shape, dtype=element_type(device), device=device).normal_()

    keys, values = (tensor(case.kv_heads, length) for _ in range(2))
    return tensor(case.query_heads, case.new), keys, values


Attend = Callable[[Tensor, Tensor, Tensor], object]


def _ways(case: Case, device: torch.device) -> Iterator[tuple[str, bool, Attend]]:
    """(name, whether it does the whole case, function of q, k, v [B, heads, tokens, d])."""
    length, new = max(case.lengths), case.new
    if device.type == "cpu":
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        yield "SDPA in fp32 on the CPU", True, partial(_sdpa, None, mask=mask)
        return
    for name, kernel in KERNELS.items():
        if new == 1:
            yield name, True, partial(_sdpa, kernel)
            yield f"{name}, heads as rows", True, partial(_heads_as_rows, kernel)
        elif new == length:
            yield name, True, partial(_sdpa, kernel, causal=True)
        elif kernel is SDPBackend.FLASH_ATTENTION:
            yield name, True, partial(_sdpa, kernel, mask=causal_lower_right(new, length))
        elif case.kind == "decode":  # its causal mask starts top left, but it reads as much
            yield f"{name}, unmasked", True, partial(_sdpa, kernel)
        else:
            yield f"{name} in two parts, unmerged", False, partial(_in_two_parts, kernel)


def _sdpa(
    kernel: SDPBackend | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    def attend() -> Tensor:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    if kernel is None:
        return attend()
    with sdpa_kernel(kernel):
        return attend()


def _heads_as_rows(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _sdpa(kernel, q.view(q.shape[0], k.shape[1], -1, q.shape[3]), k, v)


def _in_two_parts(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A chunk over what lies before it, and over itself: all the work but for merging the two."""
    before = k.shape[2] - q.shape[2]
    _sdpa(kernel, q, k[:, :, :before], v[:, :, :before])
    _sdpa(kernel, q, k[:, :, before:], v[:, :, before:], causal=True)


# -- bandwidth -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, measured: of a copy (read and written bytes), and of reading alone."""

    copy: float
    read: float


def measure_bandwidth(device: torch.device) -> Bandwidth:
    size = 1 << 24
    if device.type == "cuda":  # far larger than the cache, and smaller than the memory
        memory = torch.cuda.get_device_properties(device).total_memory
        size = min(1 << 32, 1 << (memory // 8).bit_length())
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    copied = measure([lambda: target.copy_(source)], device).median
    rows = source.view(8192, -1)
    reductions: list[Call] = [lambda: source.sum(), lambda: rows.sum(1), lambda: rows.amax(1)]
    read = min(measure([reduction], device).median for reduction in reductions)
    return Bandwidth(2 * size / copied, size / read)


def release(device: torch.device) -> None:
    """Give memory that is no longer used back, so that the next case finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
