"""What CUDA graphs need of the plugin, as far as a CPU can show it: tables that stay where they
are, and padded rows that touch nothing."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang.srt.plugins")

import torch
from schedulers import engine
from serving_models import prompts

#: Rows of a graph, however few requests there are.
ROWS = 6


def through_graphs(backend, monkeypatch):
    """Have decode steps go the way of graphs, padded as SGLang pads them: request 0, length 1, and
    no slot (when it captures: slot 0). Returns the addresses that they saw."""
    seen = set()
    eager, decode = backend.init_forward_metadata, backend.forward_decode
    backend.init_cuda_graph_state(ROWS, ROWS)

    def padded(tensor, value):
        more = torch.full((ROWS - tensor.shape[0], *tensor.shape[1:]), value, dtype=tensor.dtype)
        return torch.cat([tensor, more])

    def init_forward_metadata(batch):
        if not batch.forward_mode.is_decode():
            return eager(batch)
        graph = SimpleNamespace(
            batch_size=ROWS,
            req_pool_indices=padded(batch.req_pool_indices, 0),
            seq_lens=padded(batch.seq_lens, backend.get_cuda_graph_seq_len_fill_value()),
            out_cache_loc=batch.out_cache_loc,
        )
        # The torch backend takes lengths when it plans: as if every step were a capture.
        backend.init_forward_metadata_out_graph(graph, in_capture=True)
        seen.add(tuple(tensor.data_ptr() for tensor in vars(backend.step).values()))
        assert backend.step.seq_lens.tolist()[batch.batch_size :] == [0] * (ROWS - batch.batch_size)
        return None

    def forward_decode(q, k, v, layer, batch, **options):
        made = decode(padded(q, 7.0), padded(k, 7.0), padded(v, 7.0), layer, batch, **options)
        return made[: q.shape[0]]

    monkeypatch.setattr(backend, "init_forward_metadata", init_forward_metadata)
    monkeypatch.setattr(backend, "forward_decode", forward_decode)
    return seen


def test_padded_rows_touch_nothing(tiny_model, monkeypatch):
    asked = prompts(5, 300, 700)
    with engine(tiny_model, {"strict": True}) as started:
        expected = started.generate(asked, 40)
    with engine(tiny_model, {"strict": True}) as started:
        pool = started.allocator.pool
        for pages in pool.k_buffer:
            pages[0] = 0xFF  # page 0, where padding points
        backend = started.scheduler.tp_worker.model_runner.attn_backend
        seen = through_graphs(backend, monkeypatch)
        assert started.generate(asked, 40) == expected
        assert len(seen) == 1
        assert all(bool((pages[0] == 0xFF).all()) for pages in pool.k_buffer)


def test_a_capture_without_requests_writes_nothing(tiny_model):
    """SGLang captures with zeros for everything."""
    with engine(tiny_model, {}) as started:
        runner, pool = started.scheduler.tp_worker.model_runner, started.allocator.pool
        backend = runner.attn_backend
        backend.init_cuda_graph_state(ROWS, ROWS)
        zeros = torch.zeros(ROWS, dtype=torch.int64)
        graph = SimpleNamespace(
            batch_size=ROWS, req_pool_indices=zeros, seq_lens=zeros + 1, out_cache_loc=zeros
        )
        backend.init_forward_metadata_out_graph(graph, in_capture=True)
        for pages in pool.k_buffer:
            pages.fill_(0xAB)
        layer = runner.model.model.layers[0].self_attn.attn
        q = torch.randn(ROWS, layer.tp_q_head_num * layer.head_dim)
        k, v = (torch.randn(ROWS, layer.tp_k_head_num, layer.head_dim) for _ in range(2))
        backend.forward_decode(q, k, v, layer, graph)
        assert all(bool((pages == 0xAB).all()) for pages in pool.k_buffer)
