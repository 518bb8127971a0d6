"""What a captured graph relies on, as far as it can be seen without a GPU: a replay reads vLLM's
buffers where the capture saw them, and rows beyond the batch are read and written by nobody."""

import pytest

pytest.importorskip("vllm.config")

import torch
from helpers import make_layer
from serving_models import RECENT, SINK, prompts

from oscarkv import Recipe


@pytest.fixture(scope="module")
def engine(tiny_model):
    with tiny_model.engine({"strict": True}, max_num_seqs=4) as made:
        yield made


@pytest.fixture
def runner(engine):
    core = engine.llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def test_decodes_are_captured_whatever_the_number_of_drafts(engine):
    from vllm.v1.attention.backend import AttentionCGSupport

    from oscarkv.integrations.vllm.metadata import HistoryBuilder, WindowBuilder

    config = engine.llm.llm_engine.vllm_config
    support = HistoryBuilder.get_cudagraph_support(config, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    assert WindowBuilder.get_cudagraph_support(config, None).value >= support.value


def test_steps_describe_themselves_in_the_same_tensors(engine, monkeypatch):
    from oscarkv.integrations.vllm.metadata import HistoryBuilder, WindowBuilder

    seen: dict[str, list[tuple[int, ...]]] = {"history": [], "windows": []}
    lengths = []

    def spy(name, plain):
        def build(self, prefix, common, *rest, **options):
            made = plain(self, prefix, common, *rest, **options)
            assert made.table is common.block_table_tensor
            addresses = [made.table.data_ptr(), made.table.stride(0)]
            if name == "history":
                addresses += [made.seq_lens.data_ptr(), made.query_start_loc.data_ptr()]
                lengths.append(made.seq_lens.tolist())
            seen[name].append(tuple(addresses))
            return made

        return build

    monkeypatch.setattr(HistoryBuilder, "build", spy("history", HistoryBuilder.build))
    monkeypatch.setattr(WindowBuilder, "build", spy("windows", WindowBuilder.build))
    engine.generate(prompts(40, 300), 24)
    assert len(lengths) > 20
    assert lengths[-1] != lengths[-2]
    for addresses in seen.values():
        assert len(set(addresses)) == 1


@pytest.mark.parametrize("uniform", [True, False], ids=["decodes", "prompt"])
def test_a_dummy_run_leaves_every_block_alone(engine, runner, uniform):
    """vLLM's warm-up before a capture, and its stand-in for a rank without requests."""
    caches = [layer.kv_cache for layer in engine.layers.values()]
    kept = [cache.clone() for cache in caches]
    for cache in caches:
        cache.view(torch.uint8).fill_(0xFF)
    runner._dummy_run(4, force_attention=True, uniform_decode=uniform)
    for cache in caches:
        assert bool((cache.view(torch.uint8) == 0xFF).all())
    for cache, before in zip(caches, kept, strict=True):
        cache.copy_(before)


def test_windows_let_go_of_a_cache_that_vllm_took_back(engine, runner):
    """It makes a small one first, to see what graphs take, and needs that memory again."""
    name, companion = next((n, x) for n, x in engine.layers.items() if "oscarkv" in n)
    engine.generate(prompts(20), 2)
    cache, before = companion.kv_cache, companion.layer
    assert before.window.data_ptr() == cache.data_ptr()
    companion.kv_cache = torch.tensor([])
    assert companion.layer is None
    companion.bind_kv_cache(cache)
    engine.generate(prompts(20), 2)
    assert companion.layer is not before
    assert companion.layer.memo is before.memo, name


def test_rows_beyond_the_batch_change_nothing():
    """A batch of 2 in a graph of 4: lengths 0, no new tokens, tables that name the null block."""
    from oscarkv.integrations.vllm.metadata import HistoryMetadata
    from oscarkv.integrations.vllm.settings import Settings
    from oscarkv.integrations.vllm.step import Step

    recipe = Recipe.named("uniform", sink=SINK, recent=RECENT)
    layer = make_layer(recipe, pages=40)
    random = torch.Generator().manual_seed(0)
    step = Step(Settings("unused"), torch.device("cpu"), 4)
    pages = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    k, v = (torch.randn(320, 2, 64, generator=random) for _ in range(2))
    positions = torch.arange(160)
    slots = torch.cat([row[positions // 16] * 16 + positions % 16 for row in pages.long()])
    step.decoding.write(k, v, slots, slots, layer)
    q = torch.randn(4, 4, 64, generator=random)

    def attend(batch: int) -> torch.Tensor:
        lengths = torch.tensor([160, 97, 0, 0], dtype=torch.int32)[:batch]
        starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)[: batch + 1]
        table = torch.zeros(batch, 10, dtype=torch.int32)
        table[:2] = pages
        out = torch.full((4, 4, 64), 7.0)
        step.plan(HistoryMetadata(batch, batch, batch, 1, 1, starts, lengths, table), table, layer)
        step.attend(q, k[:4], v[:4], layer, out)
        return out

    plain, padded = attend(2), attend(4)
    assert torch.equal(padded, plain)
    assert bool((plain[:2] != 7).all())
    assert bool((padded[2:] == 7).all())


def test_a_batch_with_a_prompt_decodes_one_token_at_a_time():
    """However many tokens the prompt brings: kernels are made for the longest decode."""
    from types import SimpleNamespace

    from oscarkv.integrations.vllm.metadata import HistoryBuilder

    builder = HistoryBuilder.__new__(HistoryBuilder)
    builder.reorder_batch_threshold, builder.layer_names = 1, ["layer"]
    starts = torch.tensor([0, 1, 2, 302], dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=3,
        num_actual_tokens=302,
        max_query_len=300,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 8, 300], dtype=torch.int32),
        block_table_tensor=torch.zeros(3, 4, dtype=torch.int32),
    )
    made = builder.build(0, common)
    assert (made.decodes, made.decode_tokens, made.max_decode_len) == (2, 2, 1)
    assert made.max_query_len == 300
