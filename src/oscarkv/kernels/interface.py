"""What a backend is given and what it must do.

Tokens of all sequences of a step lie one after the other: q is [tokens, query heads, d], k and v
are [tokens, KV heads, d], and `query_start_loc` says where each sequence's tokens begin. A step is

    backend.plan(seq_lens, query_start_loc, history_table, window_table, strict, max_query_len)
    for every layer:
        backend.write(k, v, history_slots, window_slots, layer)
        backend.decode(q, layer, out)            # or prefill(q, k, v, layer, out)

Only `plan` may wait for the device. `out` is allocated by the caller.

Who reads what: the query at position t reads keys below `sink` and above t - recent from the
window pages (exact), and all others from the packed history. `decode` always follows this rule.
`prefill` reads the chunk's own keys and values exactly, unless the plan is `strict`: then the rule
holds inside the chunk too, and the result does not depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from oscarkv.codec import PageLayout, RowCodec


@dataclass
class Transforms:
    """The fixed matrices of one layer, fp32, per KV head. Row vectors: stored k' = (k - m) A.

    History logits are q' k' + q m with q' = q A^-T; the history's part of the output is
    (sum p v') B^-1 + m_V sum p. The value side is None when it is folded into the weights.
    """

    key: Tensor  # A [H, d, d]
    query: Tensor  # A^-T [H, d, d], or what reads two digits of a channel (refined keys)
    key_mean: Tensor  # [H, d]
    value: Tensor | None  # B [H, d, d]
    value_inverse: Tensor | None  # B^-1 [H, d, d]
    value_mean: Tensor | None  # [H, d]
    exponents: Tensor  # e0 of keys and values, int32 [2, H]
    metric: Tensor | None = None  # A^-1 M_Q A^-T [H, d, d], for metric rounding


@dataclass
class LayerCache:
    """One layer's storage and constants, as the kernels see them."""

    history: Tensor  # uint8 [pages, H, layout.bytes]; page 0 is never used
    window: Tensor  # [pages, H, 2 (k, v), 16, d]; page 0 is never used
    transforms: Transforms
    layout: PageLayout
    key_codec: RowCodec
    value_codec: RowCodec
    sink: int
    recent: int
    scale: float  # of the logits
    soft_cap: float | None = None
    sliding_window: int | None = None
    memo: dict[str, Tensor] = field(default_factory=dict)  # constants a backend derives once

    @property
    def kv_heads(self) -> int:
        return self.history.shape[1]


class AttentionBackend(Protocol):
    """See the module's text for the order of calls."""

    name: str
    #: Steps of one token for which a single `write` costs about what one of them does; a cache may
    #: hold their keys and values back that long, since they are exact in the window meanwhile.
    write_batch: int

    def reserve(self, sequences: int) -> None:
        """Make working memory for so many sequences a step, whatever the first step brings: a
        captured graph keeps the addresses that it saw."""

    def plan(
        self,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        strict: bool = False,
        max_query_len: int | None = None,
    ) -> None:
        """Take a step's batch: lengths after this step's tokens, int32 [B]; first token of each
        sequence, int32 [B + 1]; page of each P tokens, int32 [B, n]; window page of each 16
        positions, int32 [B, m], 0 where there is none. A sequence without new tokens is padding.

        `max_query_len`, if given, is at least the longest sequence's number of new tokens: a
        backend that needs it then need not wait for the device. The tensors are kept, not copied:
        a captured graph that is replayed reads what they hold then."""

    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        """Quantise and store tokens. A slot is page * page size + offset; -1 writes nothing, and
        so does a window slot of page 0, which stands for "no page" in tables."""

    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        """Attention of the planned step's last tokens over what is stored, themselves included."""

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        """Attention of a chunk over its own keys and values and what is stored before it."""
