"""The portable GPU backend: `write`, `decode` and `prefill` as Triton kernels.

    backend.py     the interface of `oscarkv.kernels.interface`
    constants.py   a layer's matrices, in the order in which kernels read packed words
    write.py       transform, fit, pack, scatter; with fit.py (the exact fit) and parameters.py
    decode.py      split-KV attention over packed words, by decode_*.py; then merge.py
    prefill.py     chunks over the history and themselves, by prefill_*.py
    unpack.py      packed words as numbers; portable.py and powers.py: what several kernels need

With TRITON_INTERPRET=1, set before triton is first imported, everything runs on CPU tensors.
"""

from __future__ import annotations

import importlib.util

import torch


def unusable_reason() -> str | None:
    """Why this backend cannot run here, or None. Imports neither triton nor any kernel."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not torch.cuda.is_available():
        return "it needs a GPU"
    return None
