"""The companion group: exact copies of the sink and of the last `recent` tokens.

Blocks of 16 tokens, indexed by position // 16; of several times as many beside states (states.py),
which vLLM then divides into pages of 16 for the attention. A request holds real blocks for the sink
and for the tokens that queries from its end on read exactly; everything between is vLLM's null
block 0. A chunk of a prompt needs no blocks for its own queries, which read the chunk's own keys:
blocks are taken only for what is still recent at its end.

With prefix caching, blocks are also taken for what other requests will read: before the end of
a prefix that vLLM finds the request to share with an earlier one, and before every page boundary
in the last TURN tokens of the prompt. What is let go of lies in the prefix cache until its memory
is needed, which in a busy server is soon: those of a shared prefix are held, like its pages, for
as long as a request runs that uses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.serving.settings import window_page_bytes
from oscarkv.integrations.vllm import layers
from oscarkv.integrations.vllm.capacity import WindowBlocks
from oscarkv.kernels import LayerCache

BACKEND_NAME = "OSCARKV_WINDOWS"
SUFFIX = ".oscarkv_windows"


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):  # type: ignore[misc]
    """A sliding window of `sliding_window` tokens that never lets go of the first `sink`."""

    sink: int
    #: Prefix hits end at multiples of this: the history's page.
    hit_alignment: int
    #: Steps that may be under way at once.
    batches: int = 1

    @property
    def counts(self) -> WindowBlocks:
        pages = self.block_size // PAGE_QUANTUM
        return WindowBlocks(self.sink, self.sliding_window, self.hit_alignment, pages)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        return self.counts.admission(max_model_len, max_in_flight_tokens, self.batches)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        charged = self.counts.charged(vllm_config.model_config.max_model_len)
        return charged * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


class WindowManager(SingleTypeKVCacheManager):  # type: ignore[misc]
    """Real blocks for the sink and the tail, null blocks between them."""

    def __init__(self, kv_cache_spec: WindowSpec, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self.rule = kv_cache_spec.counts
        self._dropped: dict[str, int] = {}  # blocks before this one were looked at and let go
        # Blocks for hits of other requests: taken at the end of a shared prefix, found there while
        # another request held them, taken before the last turn. The first two stay to the end.
        self._shared: dict[str, range] = {}
        self._joined: dict[str, range] = {}
        self._last_turn: dict[str, range] = {}
        self._brought: dict[str, int] = {}  # blocks before this one came from a connector

    def _is_real(self, request_id: str, first: int, last: int, end: int) -> list[bool]:
        sink, tail = self.rule.sink_blocks, self.rule.tail_start(end)
        if self.enable_caching:
            tail = min(tail, self.rule.read_from(self.rule.hit_before(end)))
        shared = self._shared.get(request_id, ())
        last_turn = self._last_turn.get(request_id, ())
        return [
            index < sink or index >= tail or index in shared or index in last_turn
            for index in range(first, last)
        ]

    def _is_brought(self, first: int, last: int, end: int) -> list[bool]:
        """Of the blocks that a connector fills with all but the newest tokens: those of a hit of
        `end` tokens, and no others. Any other would be cached although nothing was put there."""
        sink, tail = self.rule.sink_blocks, self.rule.read_from(end)
        return [index < sink or index >= tail for index in range(first, last)]

    # -- allocation ----------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        held = self.req_to_blocks.get(request_id, ())
        needed = cdiv(num_tokens, self.block_size)
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        if apply_admission_cap:
            cap = self.max_admission_blocks_per_request
            have = sum(not block.is_null for block in (*held, *new_computed_blocks))
            wanted = needed if cap is None else min(needed, cap)
            return max(wanted - have, 0) + evictable
        first, real = len(held) + len(new_computed_blocks), []
        if total_computed_tokens > num_local_computed_tokens:  # a connector brings the others
            last = cdiv(total_computed_tokens, self.block_size)
            real += self._is_brought(first, last, total_computed_tokens)
            first = max(first, last)
        real += self._is_real(request_id, first, needed, num_tokens_main_model)
        new = sum(real)
        if self.enable_caching and not held:  # `_keep_shared` may take these at once
            new += min(self.rule.shared, len(real) - new)
        return new + evictable

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """The new entries of the request's table, null blocks among them: the worker appends."""
        first, last = len(self.req_to_blocks[request_id]), cdiv(num_tokens, self.block_size)
        return self._extend(
            request_id, self._is_real(request_id, first, last, num_tokens_main_model)
        )

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Tokens that a connector brings: blocks for what the next query reads of them exactly."""
        end = num_local_computed_tokens + num_external_computed_tokens
        first, last = len(self.req_to_blocks[request_id]), cdiv(end, self.block_size)
        self._extend(request_id, self._is_brought(first, last, end), record_for_zeroing)
        self._brought[request_id] = last

    def _extend(self, request_id: str, real: list[bool], record: bool = True) -> list[KVCacheBlock]:
        """New entries of a request's table, some of them real."""
        blocks = self.req_to_blocks[request_id]
        source = iter(self._take(sum(real), record))
        added = [next(source) if is_real else self._null_block for is_real in real]
        blocks.extend(added)
        return added

    def _take(self, count: int, record: bool = True) -> list[KVCacheBlock]:
        fresh: list[KVCacheBlock] = self.block_pool.get_new_blocks(count)
        if self._record_new_block_ids and record:
            self.new_block_ids.extend(block.block_id for block in fresh)
        return fresh

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Let go of what no query from here on reads. Null blocks lie between real ones, so every
        block is looked at, once. vLLM calls this before it allocates."""
        if self.enable_caching and num_prompt_tokens is not None:
            self._last_turn[request_id] = self.rule.last_turn(num_prompt_tokens)
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        first = max(self.rule.sink_blocks, self._dropped.get(request_id, 0))
        last = min(self.rule.tail_start(processed_computed_tokens), len(blocks))
        if last <= first:
            return
        shared = self._shared.get(request_id, ())
        joined = self._joined.get(request_id, ())
        freed = []
        for index in range(first, last):
            if not (blocks[index].is_null or index in shared or index in joined):
                freed.append(blocks[index])
                blocks[index] = self._null_block
        self._dropped[request_id] = last
        self.block_pool.free_blocks(reversed(freed))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        for known in (
            self._dropped,
            self._shared,
            self._joined,
            self._last_turn,
            self._brought,
        ):
            known.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        read = self.rule.before_hit(num_local_computed_tokens)
        if read and all(new_computed_blocks[index].ref_cnt for index in read):
            self._joined[request_id] = read
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )

    def cache_blocks(self, request: Request, num_tokens: int, *rest: Any, **options: Any) -> None:
        if request.request_id not in self._shared:
            self._keep_shared(request)
        super().cache_blocks(request, num_tokens, *rest, **options)

    def _keep_shared(self, request: Request) -> None:
        """Blocks for the end of a prefix whose pages are cached and whose windows are not.

        vLLM found it before the first allocation, but only here a manager sees the request. The
        blocks were counted then, and the worker gets its first table later."""
        shared = self.rule.before_hit(request.shared_prefix_boundary)
        self._shared[request.request_id] = shared
        blocks = self.req_to_blocks[request.request_id]
        # Those of a hit, here or in a connector, are not computed any more.
        found = self.num_cached_block.get(request.request_id, 0)
        found = max(found, self._brought.get(request.request_id, 0))
        missing = [i for i in shared if found <= i < len(blocks) and blocks[i].is_null]
        for index, block in zip(missing, self._take(len(missing)), strict=True):
            blocks[index] = block

    # -- prefix hits ---------------------------------------------------------------------------

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix of whole pages whose sink and whose last recent - 1 tokens are
        there. Nothing inside a window is ever read from the history instead."""
        assert isinstance(kv_cache_spec, WindowSpec)
        assert dcp_world_size == pcp_world_size == 1, "windows are not sharded over tokens"
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        found: dict[int, list[KVCacheBlock] | None] = {}

        def cached(index: int) -> list[KVCacheBlock] | None:
            if index not in found:
                found[index] = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            return found[index]

        if drop_eagle_block:
            max_length -= size
        for length in range(
            max_length // alignment_tokens * alignment_tokens, 0, -alignment_tokens
        ):
            blocks = length // size
            tail = kv_cache_spec.counts.read_from(length)
            sink = min(kv_cache_spec.counts.sink_blocks, blocks)
            needed = [*range(max(tail, sink), blocks), *range(sink)]
            if all(cached(index) is not None for index in reversed(needed)):
                chosen = {index: cached(index) for index in needed}
                rows = tuple(
                    [
                        block_pool.null_block if (hit := chosen.get(i)) is None else hit[group]
                        for i in range(blocks)
                    ]
                    for group in range(len(kv_cache_group_ids))
                )
                return rows, length
        return tuple([] for _ in kv_cache_group_ids), 0


def register_spec() -> None:
    # Registering into an empty registry would keep vLLM from filling it with its own specs.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=WindowSpec)


def page_sizes(spec: KVCacheSpec | None) -> list[Any]:
    """Tokens that our attention takes for a block: one page, whatever vLLM puts into one of its
    blocks. `spec`: of our layers, or None while vLLM chooses one block size for all."""
    return [MultipleOf(PAGE_QUANTUM) if spec is None else spec.tokens_per_state]


def cache_layouts() -> tuple[KVCacheLayout, ...] | None:
    """None: any. Pages of different bytes lie side by side, so blocks go outermost."""
    settings = layers.current()
    return (KVCacheLayout.BLHNC,) if settings is not None and settings.loaded.mixed else None


class WindowBackend(AttentionBackend):  # type: ignore[misc]
    """Gives the companion group its tables; nothing attends through it."""

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the window group has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type:
        from oscarkv.integrations.vllm.metadata import WindowBuilder

        return WindowBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cache_layouts()

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return page_sizes(kv_cache_spec)


class WindowLayer(AttentionLayerBase):  # type: ignore[misc]
    """The companion of one attention layer; vLLM binds its cache to it."""

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, sink: int, recent: int, page: int
    ) -> None:
        #: The attention layer's whole cache, once it was asked for.
        self.layer: LayerCache | None = None
        self.kv_cache = torch.tensor([])
        self.spec = WindowSpec(
            block_size=PAGE_QUANTUM,
            tokens_per_state=PAGE_QUANTUM,
            state_content_bytes=window_page_bytes(head_dim, dtype),
            num_kv_heads=heads,
            head_size=head_dim,
            dtype=dtype,
            sliding_window=recent,
            sink=sink,
            hit_alignment=page,
        )

    @property
    def kv_cache(self) -> Tensor:
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        self._kv_cache = cache
        self.layer = None  # it would keep another cache's memory

    def get_attn_backend(self) -> type[AttentionBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        return dataclasses.replace(self.spec, batches=vllm_config.max_concurrent_batches)
