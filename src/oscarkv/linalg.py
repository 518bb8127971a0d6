"""The few matrices the recipes are made of: Hadamard, bit reversal, geometric mean. All fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(dim: int) -> Tensor:
    """An orthogonal matrix with equalising columns, for any even dimension.

    Powers of two get Sylvester's Hadamard matrix, H = [[h, h], [h, -h]] / sqrt 2. Otherwise
    dim = m * 2^k with m odd, and the result is the Kronecker product of the orthonormal
    discrete Hartley transform of size m with Sylvester's matrix of size 2^k: every entry is at
    most sqrt(2 / dim) in magnitude, so a spike is still spread over the whole head.
    """
    power = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0) / (
            2**0.5
        )
    odd = dim // power
    if odd > 1:
        index = torch.arange(odd, dtype=torch.float64)
        angle = 2 * torch.pi / odd * torch.outer(index, index)
        hartley = (torch.cos(angle) + torch.sin(angle)) / odd**0.5
        matrix = torch.kron(hartley, matrix)
    return matrix


def bit_reversal(dim: int) -> Tensor:
    """br(i) for i < dim: ranks interleaved over the head.

    For powers of two it reverses the bits of i. Otherwise the indices below `dim` are taken in
    the order in which the next power of two visits them, which is still a permutation.
    """
    bits = max(1, (dim - 1).bit_length())
    order = [int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits)]
    return torch.tensor([i for i in order if i < dim])


def symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _spectral(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(symmetric(matrix))
    values = values.clamp_min(torch.finfo(values.dtype).tiny)
    return (vectors * values.pow(power).unsqueeze(-2)) @ vectors.mT


def spd_power(matrix: Tensor, power: float) -> Tensor:
    """A power of symmetric positive definite matrices (batched)."""
    return _spectral(matrix, power)


def geometric_mean(a: Tensor, b: Tensor) -> Tensor:
    """a # b: the one symmetric positive definite X with X a^-1 X = b."""
    root, inverse_root = spd_power(a, 0.5), spd_power(a, -0.5)
    return symmetric(root @ spd_power(inverse_root @ b @ inverse_root, 0.5) @ root)


def unit_trace(matrix: Tensor, ridge: float) -> Tensor:
    """matrix / (tr / d) + ridge I: scale-free, and safely invertible."""
    dim = matrix.shape[-1]
    mean_eigenvalue = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(dim, dtype=matrix.dtype, device=matrix.device)
    return symmetric(matrix) / mean_eigenvalue + ridge * eye
