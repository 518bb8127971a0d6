"""Metric rounding: choose key codes for the error that queries will see, not for the row's own.

Coordinate descent on (x - xhat) M (x - xhat)^T over the codes, one channel after the other. Only
encode time grows; readers notice nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 2
#: Share of the mean eigenvalue added to the metric, so that no direction is free of charge.
DAMPING = 0.02


def metric_round(
    rows: Tensor, codes: Tensor, s: Tensor, lo: Tensor, metric: Tensor, levels: int
) -> Tensor:
    """Rows fp32 [H, n, d], their codes, and the grid s, lo [H, n, G] -> better codes.

    The grid is the one before the unbiasing gain: descending under the stretched grid would
    shrink the codes again and undo it.
    """
    dim = rows.shape[-1]
    eye = torch.eye(dim, dtype=metric.dtype, device=metric.device)
    mean_eigenvalue = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damped = metric + DAMPING * mean_eigenvalue * eye
    width = dim // s.shape[-1]
    s, lo = s.repeat_interleave(width, -1), lo.repeat_interleave(width, -1)
    c = codes.float()
    gradient = torch.einsum("hnd,hde->hne", s * c + lo - rows, damped)
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    for _ in range(SWEEPS):
        for j in range(dim):
            best = c[..., j] - gradient[..., j] / (diagonal[:, j, None] * s[..., j])
            new = torch.floor(best + 0.5).clamp(0, levels - 1)
            change = (new - c[..., j]) * s[..., j]
            c[..., j] = new
            gradient = gradient + change[..., None] * damped[:, j, None]
    return c.to(torch.uint8)
