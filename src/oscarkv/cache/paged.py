"""A batch of ragged sequences over two page pools: packed history and exact windows.

    positions   0 ........ sink ................................ length - recent ......... length
    windows     [== exact ==]                                            [====== exact ======]
    history     [================================ packed ====================================]

Every token is packed once, when it is appended; those in the sink and the recent window keep an
exact copy as well, in pages of 16 tokens. Leaving the window is then nothing but dropping a page.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscarkv.cache.allocator import PageAllocator
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.errors import CacheError
from oscarkv.kernels import LayerCache
from oscarkv.kernels.rows import decode_tokens

#: Chunks up to this long keep exact copies of all their tokens, so that a speculative step can be
#: rolled back with nothing lost; longer ones keep those of the last `recent` tokens.
ROLLBACK_TOKENS = 64
#: Pools grow by at least this share: few copies, little slack.
GROWTH = 1 / 16
#: Tables are made with half as many columns again as they need, and with this many at least.
TABLE_COLUMNS = 64
#: Up to this many changed entries of a table are set one by one; more are sent together.
FEW_CHANGES = 4


@dataclass
class _Sequence:
    length: int = 0
    history: list[int] = field(default_factory=list)  # page of each `page_size` positions
    windows: list[int] = field(default_factory=list)  # page of each 16 positions, 0 if none
    dropped: int = 0  # window pages before this one are gone, the sink's aside
    # Entries that the tables on the device do not have yet.
    changed_history: list[int] = field(default_factory=list, compare=False)
    changed_windows: list[int] = field(default_factory=list, compare=False)

    def set_window(self, window: int, page: int) -> None:
        self.windows[window] = page
        self.changed_windows.append(window)


@dataclass(frozen=True)
class Step:
    """What a backend needs to write and read one step's tokens.

    The tables are the cache's own, and change with it: they are good until the next step.
    """

    seq_lens: Tensor
    query_start_loc: Tensor
    history_table: Tensor
    window_table: Tensor
    history_slots: Tensor
    window_slots: Tensor
    max_query_len: int


class _Table:
    """Pages of all sequences on the device, int32 [sequences, columns]; 0 beyond a row's end."""

    def __init__(self, device: torch.device) -> None:
        self._pages = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._whole = False  # whether it holds more than changes to it

    def forget(self) -> None:
        """Rows have come, gone or moved: all will be sent anew."""
        self._whole = False

    def update(self, rows: list[list[int]], changed: list[list[int]]) -> Tensor:
        """The table [rows, longest], after sending what changed since the last time."""
        width = max((len(row) for row in rows), default=0)
        if width > self._pages.shape[1] or not self._whole:
            if width > self._pages.shape[1] or self._pages.shape[0] != len(rows):
                self._allocate(len(rows), max(TABLE_COLUMNS, -(-width * 3 // 32) * 16))
            self._send_all(rows, width)
        elif count := sum(len(columns) for columns in changed):
            self._send_changes(rows, changed, count)
        for columns in changed:
            columns.clear()
        return self._pages[:, :width]

    def _allocate(self, rows: int, columns: int) -> None:
        with torch.inference_mode(False):  # it is changed in any mode
            self._pages = torch.zeros(rows, columns, dtype=torch.int32, device=self._pages.device)

    def _send_all(self, rows: list[list[int]], width: int) -> None:
        padded = array.array("i")
        for row in rows:
            padded.extend(row)
            padded.extend([0] * (width - len(row)))
        if padded:
            (sent,) = _send(self._pages.device, padded)
            self._pages[:, :width] = sent.view(len(rows), width)
        self._pages[:, width:] = 0
        self._whole = True

    def _send_changes(self, rows: list[list[int]], changed: list[list[int]], count: int) -> None:
        if count <= FEW_CHANGES:
            for index, (row, columns) in enumerate(zip(rows, changed, strict=True)):
                for column in columns:
                    self._pages[index, column] = row[column] if column < len(row) else 0
            return
        places, pages = array.array("q"), array.array("i")
        stride = self._pages.shape[1]
        for index, (row, columns) in enumerate(zip(rows, changed, strict=True)):
            for column in sorted(set(columns)):
                places.append(index * stride + column)
                pages.append(row[column] if column < len(row) else 0)
        self._pages.view(-1).index_copy_(0, *_send(self._pages.device, places, pages))


class PagedCache:
    """Pages of all layers, allocated together: page n is page n of every layer.

    `layers` come with empty pools (only page 0); the cache grows them as tokens arrive, up to
    `max_pages` history pages where that is given.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        sink: int,
        recent: int,
        page_size: int,
        keep_history: bool = True,
        max_pages: int | None = None,
    ) -> None:
        self.layers = list(layers)
        self.sink, self.recent, self.page_size = sink, recent, page_size
        self.keep_history = keep_history
        self.max_pages = max_pages
        self.history_pages = PageAllocator()
        self.window_pages = PageAllocator()
        self._sequences: list[_Sequence] = []
        self._longest_step = 0
        self.device = self.layers[0].history.device
        self._history_table, self._window_table = _Table(self.device), _Table(self.device)

    # -- sequences ---------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        return [sequence.length for sequence in self._sequences]

    def add(self, count: int = 1) -> None:
        """Add empty sequences at the end of the batch."""
        self._sequences.extend(_Sequence() for _ in range(count))
        self._forget_tables()

    def fork(self, index: int) -> None:
        """Add a copy of a sequence that shares its pages until one of the two writes."""
        self._sequences.append(self._copy(self._sequences[index]))
        self._forget_tables()

    def reorder(self, indices: Sequence[int]) -> None:
        """Make sequence i a copy of the old sequence indices[i]; the others are freed."""
        before = self._sequences
        self._sequences = [self._copy(before[index]) for index in indices]
        for sequence in before:
            self._release(sequence, 0)
        self._forget_tables()

    def free(self, index: int) -> None:
        """Drop a sequence from the batch; those after it move up."""
        self._release(self._sequences.pop(index), 0)
        self._forget_tables()

    def truncate(self, index: int, length: int) -> None:
        """Forget the tokens from `length` on.

        Where the window then reaches back to tokens whose exact copies are gone (after cutting
        deeper than the last step, or into a long one), they are filled in from the packed history.
        """
        sequence = self._sequences[index]
        if not 0 <= length <= sequence.length:
            raise CacheError(f"sequence {index} has {sequence.length} tokens, not {length} or more")
        if length == sequence.length:
            return
        self._release(sequence, length)
        sequence.length, sequence.dropped = length, 0
        missing = [w for w in self._needed_windows(length) if not sequence.windows[w]]
        self._ensure(0, len(missing))
        for window in missing:
            sequence.set_window(window, self.window_pages.allocate())
            self._refill_window(sequence, window)

    def _copy(self, sequence: _Sequence) -> _Sequence:
        history = [self.history_pages.share(page) for page in sequence.history]
        windows = [self.window_pages.share(page) for page in sequence.windows]
        return _Sequence(sequence.length, history, windows, sequence.dropped)

    def _release(self, sequence: _Sequence, length: int) -> None:
        """Release the pages that hold no position below `length`."""
        keep = -(-length // self.page_size) if self.keep_history else 0
        for page in sequence.history[keep:]:
            self.history_pages.release(page)
        sequence.changed_history.extend(range(keep, len(sequence.history)))
        del sequence.history[keep:]
        keep = -(-length // PAGE_QUANTUM)
        for page in sequence.windows[keep:]:
            self.window_pages.release(page)
        sequence.changed_windows.extend(range(keep, len(sequence.windows)))
        del sequence.windows[keep:]

    # -- a step ------------------------------------------------------------------------------

    def append(self, counts: Sequence[int]) -> Step:
        """Make room for counts[i] new tokens of sequence i, and say where they go."""
        if len(counts) != len(self._sequences):
            raise CacheError(f"{len(counts)} counts for {len(self._sequences)} sequences")
        plans = [self._plan(s, n) for s, n in zip(self._sequences, counts, strict=True)]
        history = sum(plan.history for plan in plans)
        self._require(history)
        for sequence, count in zip(self._sequences, counts, strict=True):
            if count:
                self._drop_windows(sequence)
        self._ensure(history, sum(plan.windows for plan in plans))
        self._longest_step = max(counts, default=0)
        history_slots: list[int] = []
        window_slots: list[int] = []
        for sequence, count, plan in zip(self._sequences, counts, plans, strict=True):
            if not count:
                continue
            self._own_last_pages(sequence)
            start = sequence.length
            sequence.length += count
            if self.keep_history:
                while len(sequence.history) * self.page_size < sequence.length:
                    sequence.changed_history.append(len(sequence.history))
                    sequence.history.append(self.history_pages.allocate())
            columns = -(-sequence.length // PAGE_QUANTUM)
            sequence.windows.extend([0] * (columns - len(sequence.windows)))
            for window in plan.new_windows:
                if not sequence.windows[window]:
                    sequence.set_window(window, self.window_pages.allocate())
            positions = range(start, sequence.length)
            history_slots += _slots(sequence.history, positions, self.page_size)
            window_slots += _slots(sequence.windows, positions, PAGE_QUANTUM)
        return self._step(counts, history_slots, window_slots)

    def trim(self) -> None:
        """Give back what only the last step's own queries read, once every layer has read it.

        After a short step nothing is given back, so that it can be rolled back exactly.
        """
        if self._longest_step <= ROLLBACK_TOKENS:
            return
        for sequence in self._sequences:
            self._drop_windows(sequence)
        used = self.window_pages.used_pages
        if self.window_pages.free_pages > max(1, used * GROWTH):
            self._compact_windows()

    def _compact_windows(self) -> None:
        """Renumber the window pages in use, and let go of the others' memory."""
        numbers = {0: 0}
        for sequence in self._sequences:
            for page in sequence.windows:
                numbers.setdefault(page, len(numbers))
            sequence.windows = [numbers[page] for page in sequence.windows]
        self._window_table.forget()
        kept = list(numbers)  # old numbers, in their new order
        self.window_pages.compact(kept)
        with torch.inference_mode(False):  # as in `_grow`
            index = torch.tensor(kept, device=self.device)
            for layer in self.layers:
                layer.window = layer.window[index]

    @dataclass
    class _Need:
        history: int
        windows: int
        new_windows: list[int]

    def _plan(self, sequence: _Sequence, count: int) -> _Need:
        """The pages an append takes, copies on write included (at most one too many of those:
        the last of several sharers that write in one step keeps the page)."""
        if count < 0:
            raise CacheError(f"cannot append {count} tokens")
        if not count:
            return self._Need(0, 0, [])
        end = sequence.length + count
        first = sequence.length // PAGE_QUANTUM
        last = -(-end // PAGE_QUANTUM)
        if count <= ROLLBACK_TOKENS:
            new = list(range(first, last))
        else:
            recent = max(first, max(0, end - self.recent) // PAGE_QUANTUM)
            sink = min(-(-self.sink // PAGE_QUANTUM), last)
            new = sorted({*range(first, sink), *range(recent, last)})
        pages = -(-end // self.page_size) - len(sequence.history) if self.keep_history else 0
        missing = [w for w in new if not any(sequence.windows[w : w + 1])]
        copies = _shared(sequence.history, sequence.length % self.page_size, self.history_pages)
        window_copies = _shared(sequence.windows, sequence.length % PAGE_QUANTUM, self.window_pages)
        return self._Need(pages + copies, len(missing) + window_copies, new)

    def _drop_windows(self, sequence: _Sequence) -> None:
        """Release window pages that no query from the sequence's end on will read."""
        first = max(-(-self.sink // PAGE_QUANTUM), sequence.dropped)
        last = (sequence.length - self.recent + 1) // PAGE_QUANTUM
        for window in range(first, last):
            if sequence.windows[window]:
                self.window_pages.release(sequence.windows[window])
                sequence.set_window(window, 0)
        sequence.dropped = max(sequence.dropped, last)

    def _needed_windows(self, length: int) -> list[int]:
        """Window pages with a position that a query at `length` reads exactly."""
        columns = -(-length // PAGE_QUANTUM)
        sink = min(-(-self.sink // PAGE_QUANTUM), columns)
        recent = max(sink, max(0, length - self.recent + 1) // PAGE_QUANTUM)
        return [*range(sink), *range(recent, columns)]

    def _own_last_pages(self, sequence: _Sequence) -> None:
        """Copy the partly filled last pages if another sequence shares them."""
        if sequence.length % self.page_size and self.keep_history:
            page = self._own(sequence.history[-1], self.history_pages, "history")
            if page != sequence.history[-1]:
                sequence.history[-1] = page
                sequence.changed_history.append(len(sequence.history) - 1)
        if sequence.length % PAGE_QUANTUM:
            page = self._own(sequence.windows[-1], self.window_pages, "window")
            if page != sequence.windows[-1]:
                sequence.set_window(len(sequence.windows) - 1, page)

    def _own(self, page: int, pool: PageAllocator, storage: str) -> int:
        if not page or pool.references(page) == 1:
            return page
        copy = pool.allocate()
        for layer in self.layers:
            tensor: Tensor = getattr(layer, storage)
            tensor[copy] = tensor[page]
        pool.release(page)
        return copy

    def _step(
        self, counts: Sequence[int], history_slots: list[int], window_slots: list[int]
    ) -> Step:
        lengths, starts = self.lengths, [0]
        for count in counts:
            starts.append(starts[-1] + count)
        seq_lens, query_start_loc, history, windows = _send(
            self.device,
            array.array("i", lengths),
            array.array("i", starts),
            array.array("q", history_slots),
            array.array("q", window_slots),
        )
        sequences = self._sequences
        return Step(
            seq_lens,
            query_start_loc,
            self._history_table.update(
                [s.history for s in sequences], [s.changed_history for s in sequences]
            ),
            self._window_table.update(
                [s.windows for s in sequences], [s.changed_windows for s in sequences]
            ),
            history,
            windows,
            max(counts, default=0),
        )

    def _forget_tables(self) -> None:
        self._history_table.forget()
        self._window_table.forget()

    # -- memory ------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes the cache holds: pools of all layers, and block tables at 4 bytes an entry."""
        pools = sum(layer.history.nbytes + layer.window.nbytes for layer in self.layers)
        tables = sum(len(s.history) + len(s.windows) for s in self._sequences)
        return pools + 4 * tables

    def _require(self, history: int) -> None:
        """Refuse a step that needs more history pages than there may be."""
        short = history - self.history_pages.free_pages
        if self.max_pages is not None and self.history_pages.capacity + short > self.max_pages + 1:
            raise CacheError(
                f"the cache is full: {self.history_pages.used_pages} of {self.max_pages} history "
                f"pages in use, {history} more needed; free sequences or raise max_pages"
            )

    def _ensure(self, history: int, windows: int) -> None:
        """Have that many free pages in each pool, growing the pools where they fall short."""
        self._grow(self.history_pages, "history", history - self.history_pages.free_pages)
        self._grow(self.window_pages, "window", windows - self.window_pages.free_pages)

    def _grow(self, pool: PageAllocator, storage: str, short: int) -> None:
        if short <= 0:
            return
        pages = max(short, int(pool.capacity * GROWTH))
        if storage == "history" and self.max_pages is not None:
            pages = max(short, min(pages, self.max_pages + 1 - pool.capacity))
        with torch.inference_mode(False):  # pools are written in any mode
            for layer in self.layers:
                old: Tensor = getattr(layer, storage)
                new = old.new_zeros((old.shape[0] + pages, *old.shape[1:]))
                new[: old.shape[0]] = old
                setattr(layer, storage, new)
        pool.grow(pages)

    def _refill_window(self, sequence: _Sequence, window: int) -> None:
        """Fill a window page from the packed history."""
        position = window * PAGE_QUANTUM
        source = sequence.history[position // self.page_size]
        offset = position % self.page_size
        for layer in self.layers:
            k, v = decode_tokens(layer.history[source : source + 1], layer)
            rows = torch.stack([k, v], 2)[offset : offset + PAGE_QUANTUM]  # [16, H, 2, d]
            layer.window[sequence.windows[window]] = rows.permute(1, 2, 0, 3).to(layer.window.dtype)


def _shared(pages: list[int], partly_filled: int, pool: PageAllocator) -> int:
    """1 if writing on into the last page means copying it first, else 0."""
    return int(bool(partly_filled and pages) and pool.references(pages[-1]) > 1)


def _slots(pages: list[int], positions: range, size: int) -> list[int]:
    if not pages:
        return [-1] * len(positions)
    return [pages[p // size] * size + p % size if pages[p // size] else -1 for p in positions]


def _send(device: torch.device, *parts: array.array[int]) -> list[Tensor]:
    """Numbers on the device, in one copy that nobody waits for; each part starts at 16 bytes."""
    block, ends = bytearray(), []
    for part in parts:
        start = len(block)
        block += part.tobytes()
        ends.append((start, len(block)))
        block += bytes(-len(block) % 16)
    sent = torch.frombuffer(block, dtype=torch.uint8)
    if device.type != "cpu":
        # torch keeps a pinned buffer from being used again before its copy is done.
        sent = sent.pin_memory().to(device, non_blocking=True)
    return [
        sent[start:end].view(torch.int64 if part.typecode == "q" else torch.int32)
        for part, (start, end) in zip(parts, ends, strict=True)
    ]
