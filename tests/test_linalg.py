"""The matrices recipes are made of, and the two theorems they rest on."""

import pytest
import torch
from helpers import generator, random_spd, well_conditioned
from torch import Tensor

from oscarkv.linalg import bit_reversal, geometric_mean, hadamard, spd_power, unit_trace
from oscarkv.methods.balanced import balanced_transform
from oscarkv.methods.paper import compose

DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 192, 256]


def random_rotation(dim: int, rng: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(dim, dim, generator=rng, dtype=torch.float64)).Q


# -- Hadamard and bit reversal -------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_is_orthogonal_and_spreads_a_spike(dim: int) -> None:
    matrix = hadamard(dim)
    eye = torch.eye(dim, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, eye, atol=1e-12, rtol=0)
    assert float(matrix.abs().max()) <= (2 / dim) ** 0.5 + 1e-12
    if dim & (dim - 1) == 0:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, dim**-0.5))


def test_hadamard_is_sylvesters_recursion() -> None:
    h2 = hadamard(2)
    torch.testing.assert_close(h2, torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double() / 2**0.5)
    torch.testing.assert_close(hadamard(16), torch.kron(h2, hadamard(8)))


def test_hadamard_equalises_any_diagonal() -> None:
    values = torch.logspace(0, 4, 64, dtype=torch.float64)
    rotated = hadamard(64).T @ values.diag() @ hadamard(64)
    torch.testing.assert_close(rotated.diagonal(), values.mean().expand(64))


def test_bit_reversal_of_small_sizes() -> None:
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(128)[:5].tolist() == [0, 64, 32, 96, 16]
    assert bit_reversal(6).tolist() == [0, 4, 2, 1, 5, 3]  # of 8: 0 4 2 6 1 5 3 7 without 6, 7


@pytest.mark.parametrize("dim", DIMS)
def test_bit_reversal_is_a_permutation(dim: int) -> None:
    assert sorted(bit_reversal(dim).tolist()) == list(range(dim))


def test_p_puts_the_largest_eigenvalues_at_bit_reversed_columns() -> None:
    diagonal = torch.arange(1.0, 129, dtype=torch.float64).diag()  # eigh: U = I, ascending
    rotation = compose(diagonal, "UP")
    columns = rotation.abs().argmax(0)
    assert columns[:8].tolist() == [127, 63, 95, 31, 111, 47, 79, 15]


@pytest.mark.parametrize("dim", [64, 128])
def test_uhp_column_by_column(dim: int) -> None:
    target = random_spd(dim, generator(dim))
    rotation = compose(target, "UHP")
    basis, h = torch.linalg.eigh(target).eigenvectors, hadamard(dim)
    bits = dim.bit_length() - 1
    for j in range(dim):
        reversed_j = sum(((j >> b) & 1) << (bits - 1 - b) for b in range(bits))
        torch.testing.assert_close(rotation[:, j], basis @ h[:, dim - 1 - reversed_j])


@pytest.mark.parametrize("composition", ["UHP", "UPH", "UH", "UP", "U", "HP", "H"])
def test_every_composition_is_a_rotation_for_several_heads(composition: str) -> None:
    rng = generator(1)
    targets = torch.stack([random_spd(80, rng) for _ in range(2)])
    rotation = compose(targets, composition)
    eye = torch.eye(80, dtype=torch.float64).expand(2, 80, 80)
    torch.testing.assert_close(rotation @ rotation.mT, eye, atol=1e-10, rtol=0)
    if "U" in composition:
        assert not torch.allclose(rotation[0], rotation[1])


# -- symmetric positive definite matrices --------------------------------------------------------


def test_powers_multiply() -> None:
    matrix = torch.stack([random_spd(32, generator(seed)) for seed in range(2)])
    root = spd_power(matrix, 0.5)
    torch.testing.assert_close(root @ root, matrix)
    eye = torch.eye(32, dtype=torch.float64).expand(2, 32, 32)
    torch.testing.assert_close(spd_power(matrix, -1) @ matrix, eye, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_the_geometric_mean_solves_its_equation(dim: int) -> None:
    rng = generator(dim)
    covariance, metric = random_spd(dim, rng), random_spd(dim, rng)
    mean = geometric_mean(torch.linalg.inv(covariance), metric)  # G C G = M
    torch.testing.assert_close(mean @ covariance @ mean, metric, atol=1e-8, rtol=1e-6)
    assert float(torch.linalg.eigvalsh(mean).min()) > 0
    swapped = geometric_mean(metric, torch.linalg.inv(covariance))
    torch.testing.assert_close(mean, swapped, atol=1e-6, rtol=1e-6)


def test_unit_trace_is_scale_free_and_ridged() -> None:
    matrix = random_spd(24, generator(0))
    scaled = unit_trace(matrix, 1e-3)
    torch.testing.assert_close(unit_trace(matrix * 1e6, 1e-3), scaled)
    assert float(scaled.trace()) == pytest.approx(24 * 1.001)
    singular = torch.zeros(24, 24, dtype=torch.float64)
    singular[0, 0] = 1
    assert float(torch.linalg.eigvalsh(unit_trace(singular, 1e-3)).min()) == pytest.approx(1e-3)


# -- the theorems --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_papers_theorem_u_minimises_the_frozen_error(seed: int) -> None:
    """tr(R^T C R E), E diagonal and increasing: largest errors on the smallest eigenvalues."""
    rng = generator(seed)
    covariance = random_spd(48, rng)
    errors = torch.rand(48, generator=rng, dtype=torch.float64).sort().values

    def surrogate(rotation: Tensor) -> float:
        return float(((rotation.T @ covariance @ rotation).diagonal() * errors).sum())

    values, ascending = torch.linalg.eigh(covariance)
    basis = ascending.flip(1)  # largest eigenvalue first, beside the smallest error
    best = surrogate(basis)
    assert best == pytest.approx(float((values.flip(0) * errors).sum()))
    for _ in range(30):
        assert surrogate(random_rotation(48, rng)) > best
        small = torch.linalg.matrix_exp(0.02 * torch.randn(48, 48, generator=rng).double().triu(1))
        nearby = torch.linalg.qr(basis @ small).Q
        assert surrogate(nearby) >= best * (1 - 1e-12)


def product(transform: Tensor, covariance: Tensor, metric: Tensor) -> float:
    """Stored energy times read-out noise gain: tr(A^T C A) tr(A^-1 M A^-T)."""
    inverse = torch.linalg.inv(transform)
    energy = (transform.T @ covariance @ transform).trace()
    return float(energy * (inverse @ metric @ inverse.T).trace())


@pytest.mark.parametrize("seed", range(4))
def test_the_balanced_transform_minimises_energy_times_noise_gain(seed: int) -> None:
    dim, rng = 32, generator(seed)
    covariance, metric = random_spd(dim, rng), random_spd(dim, rng)
    transform = balanced_transform(covariance[None], metric[None], 1e-12)[0]
    best = product(transform, covariance, metric)
    root = spd_power(covariance, 0.5)
    bound = float(spd_power(root @ metric @ root, 0.5).trace()) ** 2
    assert best == pytest.approx(bound, rel=1e-6)
    eye = torch.eye(dim, dtype=torch.float64)
    for _ in range(20):
        noise = torch.randn(dim, dim, generator=rng, dtype=torch.float64)
        for other in (noise, transform @ (eye + 0.05 * noise), random_rotation(dim, rng)):
            assert product(other, covariance, metric) > best
    assert product(well_conditioned(1, dim, rng)[0], covariance, metric) > best


def test_the_balanced_transform_stores_equal_channels() -> None:
    rng = generator(9)
    covariance, metric = random_spd(64, rng), random_spd(64, rng)
    transform = balanced_transform(covariance[None], metric[None], 1e-4)[0]
    stored = (transform.T @ unit_trace(covariance, 1e-4) @ transform).diagonal()
    torch.testing.assert_close(stored, stored.mean().expand(64), rtol=1e-6, atol=0)
    inverse = torch.linalg.inv(transform)
    gain = (inverse @ unit_trace(metric, 1e-4) @ inverse.T).trace()
    assert float(gain) == pytest.approx(float(stored.sum()), rel=1e-6)  # balanced
