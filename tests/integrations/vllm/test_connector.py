"""Contexts that a KV connector marks as computed: what `bench serving` measures decoding with."""

import pytest

pytest.importorskip("vllm.config")

from serving_models import RECENT, SINK, prompts

from oscarkv.errors import OscarError

BENCH = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def test_computed_contexts_take_the_blocks_of_prefilled_ones(tiny_model):
    asked = prompts(700, 1500, 5, seed=6)
    with tiny_model.engine({}, kv_transfer_config=BENCH) as engine:
        held: list[int] = []
        scheduled: list[int] = []
        managers = engine.manager.coordinator.single_type_managers

        def spy(*arguments, plain=engine.scheduler.schedule, managers=managers, **options):
            made = plain(*arguments, **options)
            scheduled.append(made.total_num_scheduled_tokens)
            history, windows = managers
            rows = windows.req_to_blocks.values()
            held.append(max((sum(not b.is_null for b in row) for row in rows), default=0))
            for name, row in windows.req_to_blocks.items():
                tokens = 224 * len(history.req_to_blocks[name])
                assert len(row) * 16 <= tokens + 16
            return made

        engine.scheduler.schedule = spy
        made = engine.generate(asked, 40)
        assert [len(tokens) for tokens in made] == [40] * 3
        assert scheduled[0] == 3  # the last token of each prompt: nothing was prefilled
        assert 0 < max(held) <= SINK // 16 + (RECENT + 16) // 16 + 2
        assert engine.used_blocks == 0
        del engine.scheduler.schedule, spy, managers


def test_as_many_blocks_are_taken_as_were_counted(tiny_model):
    """vLLM lets a request in by the count; taking more than that could find the pool empty."""
    with tiny_model.engine({}, kv_transfer_config=BENCH) as engine:
        manager = engine.manager.coordinator.single_type_managers[1]
        counted: dict[str, int] = {}
        taken: dict[str, int] = {}

        def count(request, *rest, plain=manager.get_num_blocks_to_allocate, **options):
            made = plain(request, *rest, **options)
            if not options.get("apply_admission_cap"):
                counted[request] = counted.get(request, 0) + made
            return made

        def take(request, *rest, plain=manager._extend, **options):
            made = plain(request, *rest, **options)
            taken[request] = taken.get(request, 0) + sum(not block.is_null for block in made)
            return made

        manager.get_num_blocks_to_allocate, manager._extend = count, take
        engine.generate(prompts(900, 5, 333, seed=7), 60)
        assert counted == taken
        assert len(taken) == 3
        del manager.get_num_blocks_to_allocate, manager._extend, manager, count, take


def test_other_connectors_are_refused(tiny_model):
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with (
        pytest.raises(OscarError, match="the KV connector ExampleConnector"),
        tiny_model.engine({}, kv_transfer_config=other),
    ):
        pass
