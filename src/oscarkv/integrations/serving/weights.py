"""Whether a rank's weights are those an artifact was calibrated for.

The fingerprint (`integrations/transformers/geometry.py`) samples the embeddings, then every norm
in the order of names. A rank compares what it holds of that: its rows of the embeddings, and the
norms where it has all of them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oscarkv.artifact import Artifact
from oscarkv.artifact.artifact import same_weights
from oscarkv.errors import ModelMismatchError

EMBEDDINGS, NORMS = 128, 4  # samples of the embeddings, and of each norm


def check_weights(
    artifact: Artifact,
    model: nn.Module,
    name: str,
    embedding: type,
    widths: set[int],
    split: tuple[type, ...] = (),
) -> None:
    """Refuse weights that differ from a known fingerprint. `embedding` is the engine's class of
    embeddings that are split over ranks; a norm as wide as none of `widths`, or in a module of
    the classes `split`, is a rank's share."""
    known = artifact.model.fingerprint
    if not known:
        return
    try:
        expected = torch.frombuffer(bytearray.fromhex(known), dtype=torch.bfloat16)
    except ValueError:
        raise ModelMismatchError(
            f"the artifact's fingerprint of {artifact.model.name} is unreadable; calibrate anew"
        ) from None
    pairs = [
        *_embeddings(model, embedding, expected),
        *_norms(model, expected[EMBEDDINGS:], widths, split),
    ]
    for mine, theirs in pairs:
        if not same_weights(_hex(mine), _hex(theirs)):
            raise ModelMismatchError(
                f"this artifact was calibrated for the weights of {artifact.model.name}, and "
                f"{name} has others (fine-tuned, or another model of the same shape); calibrate "
                "these: oscarkv calibrate"
            )


def _embeddings(model: nn.Module, embedding: type, expected: Tensor) -> list[tuple[Tensor, Tensor]]:
    tables: list[Any] = [m for m in model.modules() if type(m) is embedding]
    if not tables or not isinstance(getattr(tables[0], "weight", None), Tensor):
        return []  # on another pipeline stage, or quantised
    table, weight = tables[0], tables[0].weight.detach()
    width, shard = weight.shape[1], table.shard_indices
    step = max(1, table.org_vocab_size * width // EMBEDDINGS)
    index = torch.arange(EMBEDDINGS) * step
    row, column = index // width, index % width
    here = (row >= shard.org_vocab_start_index) & (row < shard.org_vocab_end_index)
    row = row[here] - shard.org_vocab_start_index
    found = weight[row.to(weight.device), column[here].to(weight.device)]
    return [(expected[:EMBEDDINGS][here], found)]


def _norms(
    model: nn.Module, expected: Tensor, widths: set[int], split: tuple[type, ...]
) -> list[tuple[Tensor, Tensor]]:
    norms = [
        parameter
        for name, parameter in sorted(model.named_parameters())
        if parameter.dim() == 1 and name.endswith("norm.weight")
    ]
    if len(expected) != NORMS * len(norms):  # layers on other stages, or norms of the engine's own
        return []
    shares = {p for m in model.modules() if isinstance(m, split) for p in m.parameters()}
    pairs = zip(expected.split(NORMS), norms, strict=True)
    whole = [
        (mine, norm.detach())
        for mine, norm in pairs
        if norm.numel() in widths and norm not in shares
    ]
    return [(mine, norm[:: max(1, norm.numel() // NORMS)][:NORMS]) for mine, norm in whole]


def _hex(values: Tensor) -> str:
    plain = values.to(torch.bfloat16).cpu().contiguous()
    return plain.view(torch.int16).numpy().astype("<i2").tobytes().hex()
