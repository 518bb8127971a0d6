"""Writes codec.safetensors, the test vectors of docs/format.md.

    python tests/vectors/make_vectors.py

For every case "d<head_dim>.b<bits>.<format>.<fit>" the file holds `codes`, `packed` and
`parameters` (uint8) of the rows "d<head_dim>.rows" (fp32) with base "base" (fp32, one per row).
The file's metadata holds each case's knobs as JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from oscarkv.codec import RowCodec, RowLayout
from oscarkv.recipe import REFINED_BITS

PATH = Path(__file__).with_name("codec.safetensors")
HEAD_DIMS = (64, 80, 96, 128, 256)
BASES = (2.0**-10, 2.0**-10, 2.0**-7, 2.0**-10, 2.0**-20, 2.0**4)


def rows_of(head_dim: int) -> Tensor:
    """Six rows: plain, shifted with outliers, a spike, constant, zero and tiny, large."""
    noise = np.random.Generator(np.random.PCG64(head_dim)).standard_normal((6, head_dim))
    rows = torch.from_numpy(noise)
    rows[1] = rows[1] * 0.5 + 2
    rows[1, [3, head_dim // 2]] = torch.tensor([40.0, -25.0], dtype=rows.dtype)
    rows[2] *= 0.01
    rows[2, 7] = 9
    rows[3] = -1.375
    rows[4] *= 1e-6
    rows[4, : head_dim // 2] = 0
    rows[5] *= 3000
    return rows.float()


def codecs_of(bits: int, head_dim: int) -> dict[str, RowCodec]:
    """Each format with least squares, in one and in more groups, and the published min/max."""
    fit = "least-squares"
    groups = head_dim // 32 if head_dim % 32 == 0 else head_dim // 16
    refined = {
        f"{stored}.ls.refined": RowCodec(bits, 1, stored, fit, 0.0, 0.75, refined=True)
        for stored in ("fp16", "log8", "log8-symmetric")
    }
    refined["log8-symmetric.ls.split"] = RowCodec(
        bits, 2, "log8-symmetric", fit, 0.0, 1.0, refined=True
    )
    return (refined if bits in REFINED_BITS else {}) | {
        "fp16.ls": RowCodec(bits, 1, "fp16", fit, 0.0, 0.75),
        "log8.ls": RowCodec(bits, 1, "log8", fit, 0.0, 1.0),
        "log8-symmetric.ls": RowCodec(bits, 1, "log8-symmetric", fit, 0.0, 0.5),
        "fp16.ls.grouped": RowCodec(bits, groups, "fp16", fit, 0.0, 0.25),
        "fp16.minmax": RowCodec(bits, 1, "fp16", "minmax", 0.96, 0.0),
    }


def make() -> tuple[dict[str, Tensor], dict[str, str]]:
    base = torch.tensor(BASES)
    tensors, cases = {"base": base}, {}
    for head_dim in HEAD_DIMS:
        rows = tensors[f"d{head_dim}.rows"] = rows_of(head_dim)
        for bits in (2, 3, 4):
            for name, codec in codecs_of(bits, head_dim).items():
                case = f"d{head_dim}.b{bits}.{name}"
                codes, stored = codec.encode(rows, base)
                tensors[f"{case}.codes"] = codes
                tensors[f"{case}.packed"] = RowLayout(head_dim, bits).pack(codes)
                tensors[f"{case}.parameters"] = stored.contiguous()
                cases[case] = asdict(codec)
    return tensors, {"cases": json.dumps(cases, sort_keys=True)}


if __name__ == "__main__":
    PATH.write_bytes(save(*make()))
    print(f"{PATH}: {PATH.stat().st_size} bytes")
