"""A step over random but valid caches, made where it is read: gigabytes in a moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscarkv.benchmark.cases import Case
from oscarkv.cache.paged import ROLLBACK_TOKENS
from oscarkv.codec import RowCodec
from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.kernels import LayerCache, Transforms
from oscarkv.kernels.interface import AttentionBackend
from oscarkv.linalg import hadamard

#: e0 of every head: 8-bit scales then reach from 2^-10 to 2^6.
EXPONENT = -10
#: Scales of the packed rows.
SCALES = (0.2, 0.4)


@dataclass(frozen=True)
class SyntheticStep:
    """One step's tables, and the layers it runs through: same pages, independent storage."""

    case: Case
    layers: list[LayerCache]
    seq_lens: Tensor
    query_start_loc: Tensor
    history_table: Tensor
    window_table: Tensor
    history_slots: Tensor
    window_slots: Tensor
    q: list[Tensor]  # [tokens, query heads, d], of each layer
    k: list[Tensor]  # [tokens, KV heads, d]
    v: list[Tensor]
    out: list[Tensor]

    def plan(self, backend: AttentionBackend) -> None:
        tables = (self.history_table, self.window_table)
        backend.plan(self.seq_lens, self.query_start_loc, *tables, max_query_len=self.case.new)

    def run(self, backend: AttentionBackend, index: int) -> None:
        """The case's kernel on one layer."""
        layer, out = self.layers[index], self.out[index]
        q, k, v = self.q[index], self.k[index], self.v[index]
        if self.case.kind == "decode":
            backend.decode(q, layer, out)
        elif self.case.kind == "prefill":
            backend.prefill(q, k, v, layer, out)
        else:
            backend.write(k, v, self.history_slots, self.window_slots, layer)


def element_type(device: torch.device) -> torch.dtype:
    """Of queries, keys and values: some CPUs say they multiply bf16 and then do not."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def make_step(
    case: Case,
    device: torch.device,
    layers: int = 1,
    seed: int = 0,
) -> SyntheticStep:
    dtype = element_type(device)
    rng = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor(case.lengths, device=device)
    history_table = _shuffled(_columns(lengths, case.page_size), rng)
    window_table = _shuffled(_window_columns(case, lengths), rng)
    positions = lengths[:, None] - case.new + torch.arange(case.new, device=device)  # [B, new]
    in_windows = positions.new_ones(positions.shape, dtype=torch.bool)
    if case.new > ROLLBACK_TOKENS:  # of a long chunk, only what later steps will read
        in_windows = (positions < case.recipe.sink) | (
            positions >= lengths[:, None] - case.recipe.recent
        )
    window_slots = _slots(window_table, positions, PAGE_QUANTUM)
    pages = int(history_table.max()) + 1, int(window_table.max()) + 1

    def rows(heads: int) -> list[Tensor]:
        shape = (case.tokens, heads, case.head_dim)
        return [_normal(shape, dtype, rng) for _ in range(layers)]

    queries = rows(case.query_heads)
    return SyntheticStep(
        case,
        [_layer(case, pages, rng) for _ in range(layers)],
        lengths.int(),
        torch.arange(len(case.lengths) + 1, device=device, dtype=torch.int32) * case.new,
        history_table,
        window_table,
        _slots(history_table, positions, case.page_size).flatten(),
        torch.where(in_windows, window_slots, -1).flatten(),
        queries,
        rows(case.kv_heads),
        rows(case.kv_heads),
        [torch.empty_like(q) for q in queries],
    )


# -- pages ---------------------------------------------------------------------------------------


def _columns(lengths: Tensor, size: int) -> Tensor:
    """Which entries of a page table are in use: bool [B, n]."""
    pages = -(-lengths // size)
    return torch.arange(int(pages.max()), device=lengths.device) < pages[:, None]


def _window_columns(case: Case, lengths: Tensor) -> Tensor:
    """Window pages that this step reads or writes."""
    used = _columns(lengths, PAGE_QUANTUM)
    first = torch.arange(used.shape[1], device=lengths.device) * PAGE_QUANTUM  # position
    sink = first < case.recipe.sink
    begin = lengths[:, None] - case.new  # the oldest query
    before = (first + PAGE_QUANTUM > begin - case.recipe.recent + 1) & (first <= begin)
    last = first + PAGE_QUANTUM > lengths[:, None] - case.recipe.recent
    return used & (sink | before | last)


def _shuffled(used: Tensor, rng: torch.Generator) -> Tensor:
    """A page table int32 [B, n]: random pages from 1 on where used, 0 elsewhere."""
    table = torch.zeros(used.shape, dtype=torch.int32, device=used.device)
    count = int(used.sum())
    table[used] = torch.randperm(count, generator=rng, device=used.device).int() + 1
    return table


def _slots(table: Tensor, positions: Tensor, size: int) -> Tensor:
    pages = table.long().gather(1, positions // size)
    return pages * size + positions % size


# -- storage -------------------------------------------------------------------------------------


def _layer(case: Case, pages: tuple[int, int], rng: torch.Generator) -> LayerCache:
    history_pages, window_pages = pages
    layout, device = case.layout, rng.device
    heads, dim = case.kv_heads, case.head_dim
    history = torch.randint(
        256, (history_pages, heads, layout.bytes), dtype=torch.uint8, device=device, generator=rng
    )
    _, _, key_parameters, value_parameters = layout.sections(history)
    for section in (key_parameters, value_parameters):
        _fill_parameters(section, layout.parameter_format, rng)
    return LayerCache(
        history=history,
        window=_normal((window_pages, heads, 2, PAGE_QUANTUM, dim), torch.bfloat16, rng),
        transforms=_transforms(case, rng),
        layout=layout,
        key_codec=RowCodec.for_keys(case.recipe, dim),
        value_codec=RowCodec.for_values(case.recipe, dim),
        sink=case.recipe.sink,
        recent=case.recipe.recent,
        scale=dim**-0.5,
    )


def _fill_parameters(section: Tensor, parameter_format: str, rng: torch.Generator) -> None:
    """Scales in SCALES and offsets about -1.5 of them, over uint8 [pages, H, P, n]."""
    low, high = SCALES
    if parameter_format == "fp16":
        half = section.view(torch.float16)
        s = torch.empty_like(half[..., 0::2], dtype=torch.float32).uniform_(
            low, high, generator=rng
        )
        half[..., 0::2] = s
        half[..., 1::2] = s * torch.empty_like(s).uniform_(-1.7, -1.3, generator=rng)
        return
    steps = [int(16 * (torch.tensor(s).log2().item() - EXPONENT)) for s in SCALES]
    section.random_(steps[0], steps[1], generator=rng)
    if parameter_format == "log8":
        section.view(torch.int8)[..., 1::2].random_(-56, -40, generator=rng)


def _transforms(case: Case, rng: torch.Generator) -> Transforms:
    """Hadamard matrices: for values as they are where the recipe takes them so, else with random
    signs; keys stretched a little, as fitted ones are."""
    heads, dim, device = case.kv_heads, case.head_dim, rng.device
    basis = hadamard(dim).float().to(device)

    def orthogonal() -> Tensor:
        signs = torch.randint(2, (heads, 1, dim), device=device, generator=rng) * 2 - 1
        return basis * signs

    rotation = orthogonal()
    stretch = torch.empty(heads, dim, 1, device=device).uniform_(-0.5, 0.5, generator=rng).exp()
    plain = case.recipe.value_transform == "hadamard"
    value = None
    if not case.folded:
        value = basis.expand(heads, dim, dim).contiguous() if plain else orthogonal()
    return Transforms(
        key=stretch * rotation,
        query=rotation / stretch,
        key_mean=_normal((heads, dim), torch.float32, rng),
        value=value,
        value_inverse=None if value is None else value.mT.contiguous(),
        value_mean=None if value is None else _normal((heads, dim), torch.float32, rng),
        exponents=torch.full((2, heads), EXPONENT, dtype=torch.int32, device=device),
    )


def _normal(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=rng.device).normal_(generator=rng)
