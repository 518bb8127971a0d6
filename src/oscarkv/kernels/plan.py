"""A step's batch, as the kernels read it: device tensors, and two facts the host knows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The tensors are kept, not copied: a replayed graph reads what they hold then."""

    seq_lens: Tensor  # int32 [B], after this step's tokens
    query_start_loc: Tensor  # int32 [B + 1]
    history_table: Tensor  # int32 [B, n]
    window_table: Tensor  # int32 [B, m], 0: no page
    strict: bool
    max_query_len: int  # at least the longest sequence's number of new tokens

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]
