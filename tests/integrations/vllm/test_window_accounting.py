"""The block manager alone, with the pages and windows of bf16: a request takes what it was said to
take, and never more than it was admitted with."""

import dataclasses
import random

import pytest

pytest.importorskip("vllm.config")

from serving_models import prompts

LENGTH, PAGE, SINK, RECENT = 16384, 112, 64, 256


class Bookkeeping:
    """vLLM's KVCacheManager with a group of history and one of windows, and as much of the
    scheduler as gives it something to count: `batches` steps are under way at once."""

    def __init__(self, blocks: int, chunk: int, batches: int = 2) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from oscarkv.integrations.vllm.windows import WindowLayer, register_spec

        register_spec()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(16, sha256)
        windows = WindowLayer(8, 128, torch.bfloat16, SINK, RECENT, PAGE).spec
        history = FullAttentionSpec(
            block_size=PAGE,
            tokens_per_state=PAGE,
            state_content_bytes=windows.state_content_bytes,
            num_kv_heads=8,
            head_size=128,
            dtype=torch.uint8,
        )
        groups = [
            KVCacheGroupSpec(["history"], history),
            KVCacheGroupSpec(["windows"], dataclasses.replace(windows, batches=batches)),
        ]
        config = KVCacheConfig(blocks, [], groups)
        self.manager = KVCacheManager(config, LENGTH, PAGE, 16, chunk * batches)
        self.windows = self.manager.coordinator.single_type_managers[1]
        self.admitted = self.windows.max_admission_blocks_per_request
        self.chunk, self.batches = chunk, batches
        self.under_way: dict[str, list[int]] = {}
        self.most_held = self.made = 0

    def request(self, tokens):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.made += 1
        return Request(
            request_id=f"request-{self.made}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=LENGTH),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def admit(self, request):
        """Tokens found in the cache; None if the request has to wait."""
        found, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        new = min(self.chunk, request.num_tokens - hit)
        if not self._allocate(request, new, hit, found, full_sequence_must_fit=True):
            return None
        return hit

    def step(self, request):
        """A chunk of the prompt or a token of the answer; False if no block is left."""
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(random.randrange(1000))
        return self._allocate(request, min(self.chunk, self.unread(request)))

    def unread(self, request):
        return request.num_tokens - request.num_computed_tokens

    def read(self, request, new=1):
        """The whole prompt and `new` tokens; returns what was found in the cache."""
        hit = self.admit(request)
        while self.unread(request):
            assert self.step(request)
        for _ in range(new):
            assert self.step(request)
        self.free(request)
        return hit

    def free(self, request):
        self.manager.free(request)
        self.under_way.pop(request.request_id, None)

    def _allocate(self, request, new, hit=0, found=None, **options):
        steps = self.under_way.setdefault(request.request_id, [])
        del steps[: len(steps) - self.batches + 1]
        request.num_in_flight_tokens = sum(steps)
        coordinator, pool = self.manager.coordinator, self.manager.block_pool
        asked = []

        def note(plain=coordinator.get_num_blocks_to_allocate, **arguments):
            asked.append((plain(**arguments), pool.get_num_free_blocks()))
            return asked[-1][0]

        coordinator.get_num_blocks_to_allocate = note
        done = self.manager.allocate_slots(request, new, hit, found, **options)
        del coordinator.get_num_blocks_to_allocate
        if done is None:
            return False
        predicted, before = asked[-1]
        taken = before - pool.get_num_free_blocks()
        if found is None:
            assert taken == predicted
        else:  # room for the end of a shared prefix, used or not
            assert taken <= predicted <= asked[0][0]
        request.num_computed_tokens += hit + new
        steps.append(new)
        held = self.windows.req_to_blocks[request.request_id]
        held = sum(not block.is_null for block in held)
        assert held <= self.admitted
        self.most_held = max(self.most_held, held)
        return True


def test_5000_shared_tokens_before_anything():
    """A chunk holds the whole prompt, as with vLLM's defaults."""
    (system,) = prompts(5000, seed=40)
    owns = prompts(3000, 2000, 1000, 500, seed=41)
    books = Bookkeeping(20000, chunk=8192)
    found = [books.read(books.request(system + own)) for own in owns]
    assert found == [0, 0, 4928, 4928]
    assert books.manager.block_pool.get_num_free_blocks() == 19999


def test_another_question_about_a_document():
    (document,) = prompts(12000, seed=42)
    books = Bookkeeping(20000, chunk=8192)
    found = [books.read(books.request(document + own)) for own in prompts(256, 30, 700, seed=43)]
    assert found == [0, 11984, 11984]


def test_a_shared_prefix_stays_while_a_request_uses_it():
    """Others come and go until every free block has been used again: its pages and its windows
    are held, by the one that found out and by those that came while it ran."""
    (system,) = prompts(5000, seed=46)
    owns = prompts(900, 800, 700, 600, 500, seed=47)
    books = Bookkeeping(600, chunk=8192)

    def churn(seed):
        for other in prompts(*[3000] * 12, seed=seed):
            assert books.read(books.request(other)) == 0

    assert books.read(books.request(system + owns[0])) == 0
    running = None
    for number, own in enumerate(owns[1:]):
        request = books.request(system + own)
        assert books.admit(request) == (4928 if number else 0)
        for _ in range(300):
            assert books.step(request)
        if running is not None:
            books.free(running)
        running = request
        churn(seed=48 + number)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("chunk", [16, 100, 300, 512, 1000, 2048, 8192])
def test_no_request_takes_more_than_it_was_admitted_with(chunk, batches):
    """Random prompts, half of them with a shared beginning, in a pool that is just large enough
    for one: whoever is alone is never short of blocks."""
    chooser = random.Random(chunk + batches)
    books = Bookkeeping(20000, chunk, batches)
    pool = 1 + -(-LENGTH // PAGE) + books.admitted
    books = Bookkeeping(pool, chunk, batches)
    shared = prompts(300, 5000, 9000, seed=44)
    for number in range(40):
        own = prompts(chooser.choice([10, 200, 2000, 6000]), seed=100 + number)[0]
        prompt = own
        if chooser.random() < 0.7:
            whole = chooser.choice(shared)
            prompt = whole[: chooser.choice([len(whole), chooser.randint(1, len(whole))])] + own
        books.read(books.request(prompt), chooser.choice([1, 150]))
        assert books.manager.block_pool.get_num_free_blocks() == pool - 1
    assert not books.windows._shared
    assert not books.windows._joined
    assert not books.windows._last_turn


def test_a_prompt_of_full_length_fits_the_pool_it_needs():
    books = Bookkeeping(20000, chunk=2048)
    pool = 1 + -(-LENGTH // PAGE) + books.admitted
    books = Bookkeeping(pool, chunk=2048)
    (whole,) = prompts(LENGTH, seed=45)
    assert [books.read(books.request(whole), new=0) for _ in range(2)] == [0, LENGTH // PAGE * PAGE]
