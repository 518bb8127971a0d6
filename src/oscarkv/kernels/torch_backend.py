"""The oracle: `plan`, `write`, `decode` and `prefill` in plain PyTorch, on any device.

The history is read a block of pages at a time, straight from its packed bytes, with the
parameters factored out of the dot products; no full-precision copy of it is ever made:

    q . k = s (q' . c) + lo sum(q') + q . m          sum p v' = sum (p s) c + sum p lo

It waits for the device wherever that keeps it simple: only backends that engines capture in graphs
must keep all waiting in `plan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oscarkv.codec import parameters
from oscarkv.codec.layout import PAGE_QUANTUM, Workspace
from oscarkv.errors import CacheError
from oscarkv.kernels.interface import LayerCache
from oscarkv.kernels.rows import bases, encode_tokens

#: History tokens that are unpacked at a time, over all sequences of a step.
HISTORY_BLOCK = 4096
#: Queries of one sequence that `prefill` handles at a time.
QUERY_BLOCK = 512
#: Logits that `prefill` holds at a time.
LOGITS_BLOCK = 1 << 25
#: Rows that `write` encodes at a time.
WRITE_BLOCK = 16384


@dataclass
class _Plan:
    seq_lens: list[int]
    query_lens: list[int]
    starts: list[int]
    history_table: Tensor
    window_table: Tensor
    strict: bool
    decode_step: _DecodeStep | None = None


@dataclass
class _DecodeStep:
    """What `decode` needs of a step, the same for all layers of one geometry."""

    key: tuple[int, int, int, int | None]  # sink, recent, page size, sliding window
    padded: Tensor | None  # [B, n] token of each query row, clamped; None if rows are not ragged
    rows: Tensor | None  # [tokens] where each token's row lies in the padded batch
    positions: Tensor  # [B, n] of the queries
    window_pages: Tensor  # [B, w]
    window_mask: Tensor | None  # [B, 1, 1, n, 16 w]; None: all visible
    blocks: list[tuple[Tensor, Tensor | None]]  # history pages [B, p], mask [B, 1, 1, n, p P]


class TorchBackend:
    """`compute_dtype=torch.float64` makes it the reference for error bounds."""

    name = "torch"
    write_batch = 16  # a write is a few hundred small operations, whatever the number of rows

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        self.dtype = compute_dtype
        self._plan: _Plan | None = None
        self._workspace = Workspace()

    # -- plan --------------------------------------------------------------------------------

    def reserve(self, sequences: int) -> None:
        pass  # no graph can hold this backend's steps

    def plan(
        self,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        history_table: Tensor,
        window_table: Tensor,
        strict: bool = False,
        max_query_len: int | None = None,
    ) -> None:
        lengths, starts = seq_lens.tolist(), query_start_loc.tolist()
        query_lens = [b - a for a, b in itertools.pairwise(starts)]
        if len(lengths) != len(query_lens):
            raise CacheError("plan: query_start_loc must have one entry more than seq_lens")
        for index, (length, new) in enumerate(zip(lengths, query_lens, strict=True)):
            if not 0 <= new <= length:
                raise CacheError(f"plan: sequence {index} has {new} new tokens of {length}")
        self._plan = _Plan(lengths, query_lens, starts, history_table, window_table, strict)

    def _planned(self) -> _Plan:
        if self._plan is None:
            raise CacheError("call plan() before write(), decode() or prefill()")
        return self._plan

    # -- write -------------------------------------------------------------------------------

    @torch.inference_mode()
    def write(
        self, k: Tensor, v: Tensor, history_slots: Tensor, window_slots: Tensor, layer: LayerCache
    ) -> None:
        for slots, first, store in (
            (window_slots, PAGE_QUANTUM, self._write_window),  # page 0 is never used
            (history_slots, 0, self._write_history),
        ):
            if slots.shape[0] == 1:  # the common step of one token, with as little ado as possible
                if int(slots) >= first:
                    store(k, v, slots, layer)
                continue
            kept = (slots >= first).nonzero().squeeze(-1)
            if not kept.numel():
                continue
            step = max(1, WRITE_BLOCK // layer.kv_heads)
            for index in kept.split(step):
                store(k[index], v[index], slots[index], layer)

    @staticmethod
    def _write_window(k: Tensor, v: Tensor, slots: Tensor, layer: LayerCache) -> None:
        pages, offsets = slots // PAGE_QUANTUM, slots % PAGE_QUANTUM
        rows = torch.stack([k, v], 2).to(layer.window.dtype)  # [n, H, 2, d]
        layer.window[pages, :, :, offsets] = rows

    @staticmethod
    def _write_history(k: Tensor, v: Tensor, slots: Tensor, layer: LayerCache) -> None:
        layout = layer.layout
        packed = encode_tokens(k, v, layer)
        pages, offsets = slots // layout.page_size, slots % layout.page_size
        for section, rows in zip(layout.sections(layer.history), packed, strict=True):
            section[pages, :, offsets] = rows

    # -- decode ------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, q: Tensor, layer: LayerCache, out: Tensor) -> None:
        plan = self._planned()
        q, out = q[: plan.starts[-1]], out[: plan.starts[-1]]  # a padded batch has more rows
        if not q.shape[0]:
            return
        step = self._decode_step(plan, layer, q.device)
        heads, dim = layer.kv_heads, q.shape[-1]
        batch, n = step.positions.shape
        rows = q.view(batch, n, *q.shape[1:]) if step.padded is None else q[step.padded]
        # [B, H, G, n, d]: the query heads of a KV head side by side
        rows = rows.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).to(self.dtype)
        pages = layer.window[step.window_pages].permute(3, 0, 2, 1, 4, 5)  # [2, B, H, w, 16, d]
        exact = self._workspace.take("windows", pages.shape, self.dtype, q.device).copy_(pages)
        keys, values = exact.flatten(3, 4).unbind(0)
        history = [(layer.history[pages], mask) for pages, mask in step.blocks]
        exact_part = (keys, values, step.window_mask)
        result = _attend(rows, layer, exact_part, history, self._workspace)
        result = result.permute(0, 3, 1, 2, 4).reshape(batch * n, -1, dim)
        out.copy_(result if step.rows is None else result[step.rows])

    def _decode_step(self, plan: _Plan, layer: LayerCache, device: torch.device) -> _DecodeStep:
        key = (layer.sink, layer.recent, layer.layout.page_size, layer.sliding_window)
        if plan.decode_step is None or plan.decode_step.key != key:
            plan.decode_step = _plan_decode(plan, layer, key, device)
        return plan.decode_step

    # -- prefill -----------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        plan = self._planned()
        for index, (start, new) in enumerate(zip(plan.starts, plan.query_lens, strict=False)):
            chunk = slice(start, start + new)
            if self._reads_itself(plan, index, layer, q.device):
                out[chunk] = self._attend_itself(q[chunk], k[chunk], v[chunk], layer)
                continue
            heads = max(1, plan.seq_lens[index] * q.shape[1])
            step = max(16, min(QUERY_BLOCK, LOGITS_BLOCK // heads))
            for first in range(0, new, step):
                last = min(first + step, new)
                rows = q[start + first : start + last]
                block = self._prefill_block(plan, index, first, rows, k[chunk], v[chunk], layer)
                out[start + first : start + last] = block

    @staticmethod
    def _reads_itself(plan: _Plan, index: int, layer: LayerCache, device: torch.device) -> bool:
        """Whether a chunk is plain causal attention: nothing lies before it, and its own keys are
        exact. Only on the CPU, where PyTorch's kernel holds few logits at a time in any dtype."""
        whole = plan.query_lens[index] == plan.seq_lens[index] > 0
        plain = layer.soft_cap is None and layer.sliding_window is None
        return whole and plain and not plan.strict and device.type == "cpu"

    def _attend_itself(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache) -> Tensor:
        """What a model computes without a cache, to the bit: codes that lie on the border of two
        are then the same whether an engine or Transformers packs a prompt."""
        q, k, v = (x.transpose(0, 1)[None].to(self.dtype) for x in (q, k, v))
        result = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
        )
        return result[0].transpose(0, 1)

    def _prefill_block(
        self,
        plan: _Plan,
        index: int,
        first: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerCache,
    ) -> Tensor:
        """Queries first .. first + len(q) of one sequence's chunk."""
        n, new = q.shape[0], k.shape[0]
        begin = plan.seq_lens[index] - new  # position of the chunk's first token
        t0, t1 = begin + first, begin + first + n  # positions of these queries
        device = q.device
        queries = torch.arange(t0, t1, device=device)
        rows = q.unflatten(1, (layer.kv_heads, -1)).permute(1, 2, 0, 3)[None].to(self.dtype)

        # Exact: the sink, and from the oldest key any of these queries reads exactly.
        oldest = t0 - layer.recent + 1 if plan.strict else min(begin, t0 - layer.recent + 1)
        oldest = max(oldest, 0)
        sink = torch.arange(min(layer.sink, oldest), device=device)
        positions = torch.cat([sink, torch.arange(oldest, t1, device=device)])
        keys, values = self._exact_rows(plan, index, positions, begin, k, v, layer)
        exact = _reads_exactly(queries, positions, layer, None if plan.strict else begin)

        # Packed: what lies between, up to the newest key any of these queries reads so.
        newest = t1 - 1 - layer.recent
        if not plan.strict:
            newest = min(newest, begin - 1)
        oldest = layer.sink
        if layer.sliding_window is not None:
            oldest = max(oldest, t0 - layer.sliding_window + 1)
        history: list[tuple[Tensor, Tensor | None]] = []
        for pages, positions in _history_blocks(plan, index, oldest, newest, layer):
            mask = _reads_history(queries, positions, layer, None if plan.strict else begin)
            history.append((layer.history[pages][None], mask[None, None, None]))
        exact_part = (keys, values, exact[None, None, None])
        result = _attend(rows, layer, exact_part, history, self._workspace)
        return result[0].permute(2, 0, 1, 3).flatten(1, 2)

    def _exact_rows(
        self,
        plan: _Plan,
        index: int,
        positions: Tensor,
        begin: int,
        k: Tensor,
        v: Tensor,
        layer: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """Exact keys and values [1, H, n, d]: from the chunk, or from the windows before it."""
        from_chunk = positions >= begin
        stored = positions[~from_chunk]
        rows = torch.stack([k, v], 2)[positions[from_chunk] - begin].to(self.dtype)  # [n, H, 2, d]
        if stored.numel():
            pages = plan.window_table[index][stored // PAGE_QUANTUM].long()
            before = layer.window[pages, :, :, stored % PAGE_QUANTUM].to(self.dtype)
            rows = torch.cat([before, rows])
        keys, values = rows.permute(2, 1, 0, 3).unsqueeze(1).unbind(0)
        return keys, values


def _reads_exactly(t: Tensor, j: Tensor, layer: LayerCache, begin: int | None) -> Tensor:
    """Whether query t reads key j exactly: [queries, keys]. `begin`: the chunk's first position,
    if its own keys are always exact."""
    t, j = t[:, None], j[None, :]
    exact = (j < layer.sink) | (j > t - layer.recent)
    if begin is not None:
        exact = exact | (j >= begin)
    return exact & _visible(t, j, layer)


def _reads_history(t: Tensor, j: Tensor, layer: LayerCache, begin: int | None) -> Tensor:
    t, j = t[:, None], j[None, :]
    packed = (j >= layer.sink) & (j <= t - layer.recent)
    if begin is not None:
        packed = packed & (j < begin)
    return packed & _visible(t, j, layer)


def _visible(t: Tensor, j: Tensor, layer: LayerCache) -> Tensor:
    if layer.sliding_window is None:
        return j <= t
    return (j <= t) & (j > t - layer.sliding_window)


def _history_blocks(
    plan: _Plan, index: int, oldest: int, newest: int, layer: LayerCache
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pages [p] and positions [p P] of one sequence's history, a block at a time."""
    size = layer.layout.page_size
    if newest < oldest:
        return
    table = plan.history_table[index]
    step = max(1, HISTORY_BLOCK // size)
    for page in range(oldest // size, newest // size + 1, step):
        stop = min(page + step, newest // size + 1)
        positions = torch.arange(page * size, stop * size, device=table.device)
        yield table[page:stop].long(), positions


def _plan_decode(
    plan: _Plan, layer: LayerCache, key: tuple[int, int, int, int | None], device: torch.device
) -> _DecodeStep:
    batch, n = len(plan.seq_lens), max(plan.query_lens, default=0)
    new = torch.tensor(plan.query_lens, device=device)
    lengths = torch.tensor(plan.seq_lens, device=device)
    offsets = torch.arange(n, device=device)
    positions = lengths[:, None] - new[:, None] + offsets  # beyond the last: never read
    padded = rows = None
    if any(length != n for length in plan.query_lens):
        starts = torch.tensor(plan.starts[:-1], device=device)
        padded = (starts[:, None] + offsets).clamp_max(plan.starts[-1] - 1)
        rows = ((offsets < new[:, None]).flatten()).nonzero().squeeze(-1)

    first = min((a - b for a, b in zip(plan.seq_lens, plan.query_lens, strict=True)), default=0)
    window_pages, window_positions = _window_pages(plan, layer, lengths, new)
    limit = lengths[:, None, None]
    t, j = positions[..., None], window_positions[:, None]
    mask = ((j < layer.sink) | (j > t - layer.recent)) & _visible(t, j, layer) & (j < limit)
    window_mask = mask & (window_pages.repeat_interleave(PAGE_QUANTUM, 1) > 0)[:, None]

    size, blocks = layer.layout.page_size, []
    newest = max(plan.seq_lens, default=0) - 1 - layer.recent
    oldest = layer.sink
    if layer.sliding_window is not None:
        oldest = max(oldest, first - layer.sliding_window + 1)
    step = max(1, HISTORY_BLOCK // size // max(batch, 1))
    if newest >= oldest:
        for page in range(oldest // size, newest // size + 1, step):
            stop = min(page + step, newest // size + 1)
            j = torch.arange(page * size, stop * size, device=device)[None, None]
            mask = (j >= layer.sink) & (j <= t - layer.recent) & _visible(t, j, layer)
            pages = plan.history_table[:, page:stop].long()
            blocks.append((pages, _unless_all(mask & (j < limit))))
    return _DecodeStep(key, padded, rows, positions, window_pages, _unless_all(window_mask), blocks)


def _unless_all(mask: Tensor) -> Tensor | None:
    """[B, n, keys] -> a mask for `_attend`, or None where it would hide nothing."""
    return None if bool(mask.all()) else mask[:, None, None]


def _window_pages(
    plan: _Plan, layer: LayerCache, lengths: Tensor, new: Tensor
) -> tuple[Tensor, Tensor]:
    """The window pages a decode step reads, [B, w], and the positions they hold, [B, 16 w]."""
    table = plan.window_table
    batch, columns = table.shape
    device = table.device
    longest = max(plan.query_lens, default=0)
    sink_pages = min(-(-layer.sink // PAGE_QUANTUM), columns)
    recent_pages = min(-(-(layer.recent + longest - 1) // PAGE_QUANTUM) + 1, columns)
    oldest = (lengths - new - layer.recent + 1).clamp_min(0) // PAGE_QUANTUM
    recent = oldest[:, None] + torch.arange(recent_pages, device=device)
    sink = torch.arange(sink_pages, device=device).expand(batch, -1)
    # A page both near the start and recent is read once, as part of the sink.
    keep = (recent >= sink_pages) & (recent < columns)
    column = torch.cat([sink, recent.clamp_max(columns - 1)], 1)
    kept = torch.cat([torch.ones_like(sink, dtype=torch.bool), keep], 1)
    pages = torch.where(kept, table.long().gather(1, column), 0)
    positions = column[..., None] * PAGE_QUANTUM + torch.arange(PAGE_QUANTUM, device=device)
    return pages, positions.flatten(1)


# -- attention -----------------------------------------------------------------------------------


def _attend(
    rows: Tensor,
    layer: LayerCache,
    exact: tuple[Tensor, Tensor, Tensor | None],
    history: list[tuple[Tensor, Tensor | None]],
    workspace: Workspace,
) -> Tensor:
    """Attention of query rows [B, H, G, n, d] -> [B, H, G, n, d].

    exact: keys and values [B, H, m, d] and a mask; history: packed pages uint8 [B, p, H, bytes]
    and a mask, for each block. Masks broadcast to [B, H, G, n, keys]; None: all visible.
    """
    batch, heads, group, n, dim = rows.shape
    q = (rows * layer.scale).reshape(batch, heads, group * n, dim)
    keys, values, mask = exact

    def finish_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
        if layer.soft_cap is not None:
            logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
        if mask is None:
            return logits
        shaped = logits.view(batch, heads, group, n, -1).masked_fill(~mask, -math.inf)
        return shaped.view_as(logits)

    logits = [finish_logits(q @ keys.mT, mask)]
    if history:
        transformed = _TransformedQueries.of(q, layer)
        blocks = [_PackedBlock(pages, layer, workspace) for pages, _ in history]
        for block, (_, mask) in zip(blocks, history, strict=True):
            logits.append(finish_logits(block.logits(transformed), mask))
            s, lo = block.parameters[1]
            block.parameters[1] = (_written(s, mask), _written(lo, mask))
    widths = [part.shape[-1] for part in logits]
    weights = torch.softmax(torch.cat(logits, -1), -1).split(widths, -1)
    result = weights[0] @ _written(values, exact[2])
    if history:
        packed = sum(block.read(p) for block, p in zip(blocks, weights[1:], strict=True))
        assert isinstance(packed, Tensor)
        share = sum(p.sum(-1, keepdim=True) for p in weights[1:])
        transforms = layer.transforms
        if transforms.value_inverse is not None:
            packed = packed @ transforms.value_inverse.to(q.dtype)
        if transforms.value_mean is not None:
            packed = packed + share * transforms.value_mean.to(q.dtype)[:, None]
        result = result + packed
    return result.view(batch, heads, group, n, dim)


def _written(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Rows [B, H, keys, ...], 0 where no query reads them: they may never have been written, and
    what lies there times a weight of 0 need not be 0."""
    if mask is None:
        return rows
    read = mask.any(-2).flatten(1, 2).any(1, keepdim=True)  # [B, 1, keys]
    return rows.masked_fill(~read[..., None], 0)


@dataclass
class _TransformedQueries:
    """q' = q A^-T, and what of it multiplies the keys' offsets and mean."""

    rows: Tensor  # [B, H, r, d]
    sums: Tensor  # [B, H, r, groups]: over the channels of a group
    means: Tensor  # [B, H, r, 1]: q . m

    @classmethod
    def of(cls, q: Tensor, layer: LayerCache) -> _TransformedQueries:
        transforms = layer.transforms
        rows = q @ transforms.query.to(q.dtype)
        return cls(
            rows,
            rows.unflatten(-1, (layer.layout.groups, -1)).sum(-1),
            q @ transforms.key_mean.to(q.dtype)[..., None],
        )


class _PackedBlock:
    """Some pages of every sequence: their logits, and their weighted sum of values."""

    def __init__(self, pages: Tensor, layer: LayerCache, workspace: Workspace) -> None:
        """pages: uint8 [B, p, H, bytes]."""
        self.workspace = workspace
        self.layout = layer.layout
        sections = self.layout.sections(pages.transpose(1, 2))  # [B, H, p, P, ...] each
        self.k_codes, self.v_codes, *stored = (section.flatten(2, 3) for section in sections)
        base = bases(layer)[:, None, :, None, None]
        levels = (layer.key_codec.levels, layer.value_codec.levels)
        if levels[0] == levels[1]:
            s, lo = parameters.load(
                torch.stack(stored), self.layout.parameter_format, levels[0], base
            )
            self.parameters = [(s[0], lo[0]), (s[1], lo[1])]
        else:
            self.parameters = [
                parameters.load(stored[i], self.layout.parameter_format, levels[i], base[i])
                for i in (0, 1)
            ]

    def logits(self, q: _TransformedQueries) -> Tensor:
        """s (q' . c) + lo sum(q') + q . m: [B, H, r, keys]."""
        scale, lo = (x.to(q.rows.dtype).mT for x in self.parameters[0])
        codes = self.layout.key_row.unpack_columns(self.k_codes, q.rows.dtype, self.workspace)
        if self.layout.groups == 1:
            products = (q.rows @ codes) * scale
        else:
            products = q.rows @ _scale_groups(codes, scale)
        return products + q.sums @ lo + q.means

    def read(self, weights: Tensor) -> Tensor:
        """sum p (s c + lo) over the block's tokens: [B, H, r, d], still transformed."""
        scale, lo = (x.to(weights.dtype).mT for x in self.parameters[1])
        codes = self.layout.value_row.unpack_columns(self.v_codes, weights.dtype, self.workspace)
        if self.layout.groups == 1:
            return (weights * scale) @ codes.mT + weights @ lo.mT
        summed = weights @ _scale_groups(codes, scale).mT
        offsets = weights @ lo.mT
        return (summed.unflatten(-1, (self.layout.groups, -1)) + offsets[..., None]).flatten(-2)


def _scale_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [..., d, n] times scales [..., groups, n]."""
    return (codes.unflatten(-2, (scale.shape[-2], -1)) * scale[..., None, :]).flatten(-3, -2)
