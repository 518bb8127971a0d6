"""Between padded batches [B, H, n, d] and the tokens of a step in a row [tokens, H, d]."""

from __future__ import annotations

import torch
from torch import Tensor

from oscarkv.cache import Step
from oscarkv.errors import CacheError
from oscarkv.kernels import LayerCache


def left_padding(padding: Tensor | None, batch: int, length: int) -> list[int]:
    """Padding tokens before each sequence, from the 2D attention mask."""
    if padding is None:
        return [0] * batch
    if padding.shape[1] < length:
        raise CacheError(
            f"the attention mask covers {padding.shape[1]} tokens, but the cache and the input "
            f"have {length}; pass the mask of all tokens so far"
        )
    padding = padding[:, :length]
    pads = (padding.int().cumsum(1) == 0).sum(1)
    *found, good = torch.cat([pads, (padding.sum(1) + pads == length).all()[None].long()]).tolist()
    if not good:
        raise CacheError(
            "the attention mask hides tokens after the first one of a sequence; OscarCache takes "
            "batches padded on the left: tokenizer.padding_side = 'left'"
        )
    return found


def real_tokens(x: Tensor, padding: list[int], seen: int) -> Tensor:
    """[B, H, n, d] -> the real tokens [tokens, H, d], each head's channels side by side.

    A view where it can be one: of single tokens, of one sequence, and of what models project.
    """
    new = x.shape[2]
    if new == 1 and x.stride(-1) == 1 and max(padding) < seen:
        return x.squeeze(2)  # by far the most calls: a token of each sequence
    rows = x.transpose(1, 2)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if max(padding) <= seen - new:
        return rows.flatten(0, 1)
    return rows[_real(padding, new, seen, x.device)]


def as_batch(tokens: Tensor, batch: int, new: int, padding: list[int], seen: int) -> Tensor:
    """[tokens, H, d] -> [B, n, H, d], zero where there was padding."""
    if max(padding) <= seen - new:
        return tokens.unflatten(0, (batch, new)) if new > 1 else tokens.unsqueeze(1)
    rows = tokens.new_zeros(batch, new, *tokens.shape[1:])
    rows[_real(padding, new, seen, tokens.device)] = tokens
    return rows


def _real(padding: list[int], new: int, seen: int, device: torch.device) -> Tensor:
    positions = torch.arange(seen - new, seen, device=device)
    return positions >= torch.tensor(padding, device=device)[:, None]


def window_rows(
    step: Step, store: LayerCache, padding: list[int], seen: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, seen, d] of sequences that lie in the windows whole."""
    table = step.window_table.long()
    rows = store.window[table].permute(3, 0, 2, 1, 4, 5).flatten(3, 4)  # [2, B, H, positions, d]
    if any(padding):
        at = (
            torch.arange(seen, device=table.device)
            - torch.tensor(padding, device=table.device)[:, None]
        )
        index = at.clamp_min(0)[None, :, None, :, None].expand(
            2, -1, rows.shape[2], -1, rows.shape[4]
        )
        rows = rows.gather(3, index)
    keys, values = rows[:, :, :, :seen].unbind(0)
    return keys, values
