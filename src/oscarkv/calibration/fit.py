"""Statistics of a layer -> its transforms, and how well they do on text held back from the fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscarkv.artifact import LayerTransforms, reader_of
from oscarkv.artifact.round_trip import keys_as_read, values_as_read
from oscarkv.calibration.statistics import (
    AttentionCall,
    LayerStatistics,
    Moments,
    PairBlock,
    pair_blocks,
    sample_positions,
)
from oscarkv.errors import CalibrationError
from oscarkv.linalg import hadamard
from oscarkv.methods import get_transform, needs
from oscarkv.recipe import Recipe

#: 8-bit scales reach from 2^-10 to 2^6 times the typical scale of a head.
EXPONENT_HEADROOM = 10


def fit_layer(
    statistics: LayerStatistics, recipe: Recipe, rotations: Tensor | None = None
) -> LayerTransforms:
    """Fit one layer. `rotations` [n, d, d]: RoPE turns (row vectors) to average over, if any."""
    if needs(recipe):
        _require_variance(statistics, recipe)
    if recipe.average_positions and rotations is not None:
        statistics = average_positions(statistics, rotations)
    heads, dim = statistics.shape
    zeros = torch.zeros(heads, dim, dtype=torch.float64, device=statistics.device)
    key = get_transform(recipe.key_transform).fit(statistics, "key", recipe)
    value = get_transform(recipe.value_transform).fit(statistics, "value", recipe)
    key_mean = statistics.read_keys.mean if recipe.center else zeros
    value_mean = statistics.read_values.mean if recipe.center else zeros
    return assemble(statistics, recipe, key, key_mean, value, value_mean)


def assemble(
    statistics: LayerStatistics,
    recipe: Recipe,
    key: Tensor,
    key_mean: Tensor,
    value: Tensor,
    value_mean: Tensor,
) -> LayerTransforms:
    """Everything that follows from the transforms and means: inverses, exponents, spectrum."""
    heads, dim = statistics.shape
    stored_keys = key.mT @ _about(statistics.keys, key_mean) @ key
    stored_values = value.mT @ _about(statistics.values, value_mean) @ value
    exponents = [_exponents(stored_keys, _stored(recipe, dim)), _exponents(stored_values)]
    metric = None
    if recipe.metric_rounding:
        key_inverse = torch.linalg.inv(key)
        metric = key_inverse @ statistics.read_queries.second_moment @ key_inverse.mT
        metric = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return LayerTransforms(
        key=key.float().contiguous(),
        query=reader_of(key, recipe).float().contiguous(),
        key_mean=key_mean.float(),
        value=value.float().contiguous(),
        value_inverse=torch.linalg.inv(value).float().contiguous(),
        value_mean=value_mean.float(),
        exponents=torch.stack(exponents),
        spectrum=torch.linalg.eigvalsh(stored_keys).flip(-1).clamp_min(0).float(),
        errors=torch.full((2, heads), math.nan, device=key.device),
        fallback=torch.zeros(heads, dtype=torch.int32, device=key.device),
        metric=None if metric is None else metric.float().contiguous(),
    )


def average_positions(statistics: LayerStatistics, rotations: Tensor) -> LayerStatistics:
    """Statistics as if the same text stood at other positions: x R over the given turns R.

    Uncentred moments are averaged, and centred only afterwards: the spread of the turning mean
    is then part of the covariance.
    """
    turned = LayerStatistics(statistics.layer, statistics.sink, statistics.recent, True)
    turned.__dict__.update(statistics.__dict__)
    for name in ("read_queries", "read_keys"):
        moments: Moments = getattr(statistics, name)
        second = torch.zeros_like(moments.second)
        for rotation in rotations:
            second += rotation.T @ moments.second @ rotation
        first = moments.first @ rotations.mean(0)
        setattr(turned, name, Moments(second / len(rotations), first, moments.weight))
    return turned


def _about(moments: Moments, mean: Tensor) -> Tensor:
    """Second moment about a given point."""
    first = moments.mean
    cross = first[:, :, None] * mean[:, None, :]
    return moments.second_moment - cross - cross.mT + mean[:, :, None] * mean[:, None, :]


def _stored(recipe: Recipe, dim: int) -> Tensor:
    """The channels of a transformed key that are encoded."""
    quarters = torch.arange(dim).view(4, -1)
    kept = [0, 2, 3] if recipe.split else [0, 1, 2] if recipe.refined else [0, 1, 2, 3]
    return quarters[kept].flatten()


def _exponents(stored: Tensor, channels: Tensor | None = None) -> Tensor:
    """e0 per head, from the typical size of a stored row's entries."""
    squares = stored.diagonal(dim1=-2, dim2=-1)
    if channels is not None:
        squares = squares[..., channels.to(squares.device)]
    mean_square = squares.mean(-1).clamp_min(1e-30)
    return (0.5 * mean_square.log2()).floor().int() - EXPONENT_HEADROOM


def _require_variance(statistics: LayerStatistics, recipe: Recipe) -> None:
    """Refuse heads that statistics say nothing about, naming them."""
    looked_at = {
        "keys": statistics.keys,
        "values": statistics.values,
        "queries": statistics.queries,
    }
    if "pairs" in needs(recipe):
        if not bool((statistics.read_keys.weight > 0).all()):
            needed = recipe.sink + recipe.recent + 1
            raise CalibrationError(
                f"layer {statistics.layer}: no key was ever read beyond the sink ({recipe.sink}) "
                f"and the recent window ({recipe.recent}); calibrate on sequences of well over "
                f"{needed} tokens (--length), with more text"
            )
        looked_at["keys that are read"] = statistics.read_keys
    for name, moments in looked_at.items():
        centred = _about(moments, moments.mean).diagonal(dim1=-2, dim2=-1).sum(-1)
        size = moments.second_moment.diagonal(dim1=-2, dim2=-1).sum(-1)
        dead = (centred <= 1e-12 * size).nonzero().flatten().tolist()
        if dead:
            raise CalibrationError(
                f"layer {statistics.layer}, KV head {dead[0]}: {name} do not vary (zero variance); "
                "check the weights and the text, or leave the layer out with --skip-layers"
            )


# -- self-check ----------------------------------------------------------------------------------


@dataclass
class _Candidate:
    transforms: LayerTransforms
    recipe: Recipe
    logit_error: Tensor  # [H]: sum of w (q . e)^2
    value_error: Tensor  # [H]: sum of p^2 |v - vhat|^2
    errors: tuple[Tensor, Tensor] = field(init=False)  # of the sequence at hand


def observe_checks(
    checks: Sequence[LayerCheck], call: AttentionCall, generator: torch.Generator
) -> None:
    """Show one layer's attention to the checks of several recipes with the same windows."""
    sink, recent = checks[0].recipe.sink, checks[0].recipe.recent
    positions = sample_positions(call.k.shape[1], sink, recent, generator)
    if positions.numel() == 0:
        return
    for check in checks:
        check._take(call)
    for head in range(call.k.shape[0]):
        for block in pair_blocks(call, head, positions, sink, recent):
            squares = torch.where(block.eligible, block.weights.square(), 0.0).sum(0)
            for check in checks:
                check._weigh(call, head, block, squares)


class LayerCheck:
    """Measures a layer's transforms by the error that queries would see.

    A balanced transform is compared with plain Hadamard, which replaces it in heads where it loses.
    Refined keys are compared with those of `unrefined`, a fit of the same recipe without refining:
    the codes of a layer are of one kind, so that is only reported (`unrefined_errors`).
    """

    def __init__(
        self,
        transforms: LayerTransforms,
        statistics: LayerStatistics,
        recipe: Recipe,
        unrefined: LayerTransforms | None = None,
    ) -> None:
        self.recipe = recipe
        heads, dim = transforms.key_mean.shape
        zeros = torch.zeros(heads, dtype=torch.float64, device=transforms.key.device)
        self.logit_scale, self.value_scale = zeros.clone(), zeros.clone()
        options = [(transforms, recipe)]
        if recipe.refined:
            if unrefined is not None:
                options.append((unrefined, recipe.unrefined))
        elif recipe.key_transform == "balanced":
            plain = assemble(
                statistics,
                recipe,
                hadamard(dim).to(transforms.key.device).expand(heads, dim, dim),
                transforms.key_mean.double(),
                transforms.value.double(),
                transforms.value_mean.double(),
            )
            options.append((plain, recipe))
        self.candidates = [_Candidate(*o, zeros.clone(), zeros.clone()) for o in options]

    def _take(self, call: AttentionCall) -> None:
        """Encode a sequence's keys and values with every candidate."""
        for candidate in self.candidates:
            candidate.errors = _round_trip_errors(call, candidate.transforms, candidate.recipe)

    def _weigh(self, call: AttentionCall, head: int, block: PairBlock, squares: Tensor) -> None:
        """Add what a block of queries would see of those errors."""
        layer = self.candidates[0].transforms
        keys, values = call.k[head].float(), call.v[head].float()
        w, q = block.sensitivity, block.queries
        self.logit_scale[head] += _weighted_square(w, q, keys - layer.key_mean[head])
        self.value_scale[head] += _sum_of(squares, values - layer.value_mean[head])
        for candidate in self.candidates:
            key_error, value_error = candidate.errors
            candidate.logit_error[head] += _weighted_square(w, q, key_error[head])
            candidate.value_error[head] += _sum_of(squares, value_error[head])

    def result(self) -> LayerTransforms:
        """The layer with its errors, heads that lose to Hadamard replaced."""
        chosen = self.candidates[0]
        layer = chosen.transforms
        logit_error = chosen.logit_error.clone()
        if len(self.candidates) > 1 and not self.recipe.refined:
            plain = self.candidates[1]
            worse = (chosen.logit_error > plain.logit_error).nonzero().flatten()
            for name in ("key", "query", "spectrum", "metric"):
                ours, theirs = getattr(layer, name), getattr(plain.transforms, name)
                if ours is not None:
                    ours[worse] = theirs[worse]
            layer.exponents[0, worse] = plain.transforms.exponents[0, worse]
            layer.fallback[worse] = 1
            logit_error[worse] = plain.logit_error[worse]
        layer.errors = torch.stack(
            [logit_error / self.logit_scale, chosen.value_error / self.value_scale]
        ).float()
        return layer

    @property
    def unrefined_errors(self) -> Tensor | None:
        """Relative errors of logits [H] that keys would have without refining."""
        if not self.recipe.refined or len(self.candidates) == 1:
            return None
        return (self.candidates[1].logit_error / self.logit_scale).float()


def _sum_of(weights: Tensor, rows: Tensor) -> Tensor:
    """sum of w |x|^2 over rows."""
    return (weights @ rows.square().sum(1)).double()


def _weighted_square(weights: Tensor, q: Tensor, rows: Tensor) -> Tensor:
    return (weights * (q @ rows.T).square()).sum().double()


def _round_trip_errors(
    call: AttentionCall, layer: LayerTransforms, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """What encoding loses of every key and value, [H, T, d] in the model's own basis."""
    keys, values = call.k.float(), call.v.float()
    return keys_as_read(keys, layer, recipe) - keys, values_as_read(values, layer, recipe) - values
