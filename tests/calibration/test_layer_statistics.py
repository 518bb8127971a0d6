"""Streaming statistics against the long way, and what becomes of bad activations."""

from typing import Any

import pytest
import torch
from calibration.dense import pair_moments, random_call, weights

from oscarkv.calibration import statistics as module
from oscarkv.calibration.statistics import AttentionCall, LayerStatistics, Moments, sample_positions
from oscarkv.errors import CalibrationError

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # pairs are weighed in fp32


def observed(calls: list[AttentionCall], sink: int = 3, recent: int = 5, **knobs: Any) -> Any:
    statistics = LayerStatistics(7, sink, recent, knobs.get("pairs", True))
    generator = torch.Generator().manual_seed(knobs.get("seed", 0))
    for call in calls:
        statistics.observe(call, generator)
    return statistics


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "kind", [{}, {"soft_cap": 1.5}, {"sliding_window": 12}, {"sliding_window": 4}]
)
def test_pair_moments(group: int, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROW_BLOCK", 20)  # several blocks
    calls = [random_call(seed, group=group, length=24 + seed, **kind) for seed in range(2)]
    statistics = observed(calls)
    for head in range(2):
        if kind.get("sliding_window") == 4:  # shorter than the recent window: nothing is packed
            assert statistics.read_keys.weight[head] == 0
            continue
        expected = pair_moments(calls, head, 3, 5)
        torch.testing.assert_close(statistics.read_keys.second_moment[head], expected.keys, **CLOSE)
        torch.testing.assert_close(statistics.read_keys.mean[head], expected.key_mean, **CLOSE)
        torch.testing.assert_close(
            statistics.read_queries.second_moment[head], expected.queries, **CLOSE
        )
        torch.testing.assert_close(
            statistics.read_values.second_moment[head], expected.values, **CLOSE
        )
        torch.testing.assert_close(statistics.read_values.mean[head], expected.value_mean, **CLOSE)


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 8), (8, 1), (4, 4)])
def test_only_pairs_that_will_be_packed_count(sink: int, recent: int) -> None:
    """Keys of the sink, and those still in a query's recent window, weigh nothing."""
    call = random_call(length=20)
    statistics = observed([call], sink, recent)
    expected = pair_moments([call], 0, sink, recent)
    torch.testing.assert_close(statistics.read_keys.second_moment[0], expected.keys, **CLOSE)
    block = next(
        module.pair_blocks(call, 0, sample_positions(20, sink, recent, None), sink, recent)
    )
    t = torch.arange(sink + recent, 20).repeat(3)[:, None]
    j = torch.arange(20)[None]
    assert torch.equal(block.eligible, (j >= sink) & (j <= t - recent))
    assert block.sensitivity[~block.eligible].abs().max() == 0


def test_plain_moments_and_the_softmax_target() -> None:
    """E[o o^T] over a KV head's query heads is (1/N) V^T S^T S V."""
    call = random_call()
    statistics = observed([call], pairs=False)
    for head in range(2):
        readers = range(3 * head, 3 * head + 3)
        v = call.v[head].double()
        softmax = sum(v.T @ weights(call, i).T @ weights(call, i) @ v for i in readers) / (3 * 40)
        torch.testing.assert_close(statistics.outputs.second_moment[head], softmax, **CLOSE)
        q = call.q[3 * head : 3 * head + 3].double().flatten(0, 1)
        torch.testing.assert_close(statistics.queries.second_moment[head], q.T @ q / len(q))
        k = call.k[head].double()
        torch.testing.assert_close(statistics.keys.second_moment[head], k.T @ k / 40)
        torch.testing.assert_close(statistics.keys.mean[head], k.mean(0))
        torch.testing.assert_close(statistics.values.mean[head], v.mean(0))


def test_score_weighted_values() -> None:
    """The published code's target: V^T diag(w) V / T with w_t = k_t^T E[q q^T] k_t, mean 1."""
    calls = [random_call(seed) for seed in range(2)]
    statistics = observed(calls, pairs=False)
    for call in calls:
        statistics.observe_scores(call)
    for head in range(2):
        q = torch.cat([c.q[3 * head : 3 * head + 3].double().flatten(0, 1) for c in calls])
        k, v = (torch.cat([getattr(c, x)[head].double() for c in calls]) for x in "kv")
        metric = q.T @ q / len(q)
        w = torch.einsum("td,de,te->t", k, metric, k)
        expected = v.T @ ((w / w.mean())[:, None] * v) / len(v)
        torch.testing.assert_close(statistics.scored_values.second_moment[head], expected)


def joined(calls: list[AttentionCall]) -> AttentionCall:
    parts = {name: torch.cat([getattr(c, name) for c in calls], 1) for name in "qkvo"}
    return AttentionCall(**parts, scale=calls[0].scale)


def test_documents_do_not_read_each_other() -> None:
    calls = [random_call(seed) for seed in range(3)]
    apart, together = observed(calls), observed([joined(calls)])
    torch.testing.assert_close(apart.keys.second, together.keys.second)  # the same tokens
    difference = apart.read_keys.second_moment - together.read_keys.second_moment
    assert difference.norm() > 0.05 * apart.read_keys.second_moment.norm()


def test_order_of_documents_does_not_matter() -> None:
    calls = [random_call(seed) for seed in range(3)]
    one, other = observed(calls), observed(calls[::-1])
    for name, moments in vars(one).items():
        if isinstance(moments, Moments):
            torch.testing.assert_close(moments.second, getattr(other, name).second)


def size(statistics: LayerStatistics) -> int:
    moments = [x for x in vars(statistics).values() if isinstance(x, Moments)]
    assert len(moments) == 8
    rest = [x for x in vars(statistics).values() if not isinstance(x, Moments)]
    assert all(isinstance(x, int | bool) for x in rest)
    return sum(t.untyped_storage().nbytes() for m in moments for t in vars(m).values())


def test_state_does_not_grow() -> None:
    few = observed([random_call(length=20)])
    many = observed([random_call(seed, length=80) for seed in range(5)])
    assert size(few) == size(many) == 8 * 8 * 2 * (64 + 8 + 1)
    assert (few.tokens, many.tokens) == (20, 400)


@pytest.mark.parametrize("length", [10, 12, 13, 500, 3000])
def test_sampled_queries(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = sample_positions(length, 4, 8, generator)
    assert len(positions) == min(max(0, length - 12), module.PAIR_QUERIES)
    if len(positions):
        assert positions[0] >= 12
        assert positions[-1] < length
        assert (positions.diff() >= 0).all()
    if length == 3000:
        again = sample_positions(length, 4, 8, torch.Generator().manual_seed(0))
        other = sample_positions(length, 4, 8, torch.Generator().manual_seed(1))
        assert torch.equal(positions, again)
        assert not torch.equal(positions, other)


@pytest.mark.parametrize("name", ["queries", "keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_activations_name_the_layer(name: str, bad: float) -> None:
    call = random_call()
    getattr(call, name[0])[1, 5, 2] = bad
    with pytest.raises(CalibrationError, match=f"layer 7: NaN or infinite {name}"):
        observed([call])


def test_blended_parts_count_alike() -> None:
    """However many tokens a part has, and however sharply its queries read."""
    short, long = observed([random_call(1)]), observed([random_call(s) for s in (2, 3, 4)])
    blended = LayerStatistics.blend([short, long])
    for name in ("queries", "keys", "read_queries", "read_keys", "read_values"):
        one, other, both = (getattr(s, name) for s in (short, long, blended))
        torch.testing.assert_close(both.mean, (one.mean + other.mean) / 2)
        expected = (one.second_moment + other.second_moment) / 2
        torch.testing.assert_close(both.second_moment, expected)
    assert blended.tokens == short.tokens + long.tokens
    assert (blended.layer, blended.sink, blended.recent) == (7, 3, 5)


def test_a_part_in_which_nothing_is_read_does_not_count() -> None:
    full, brief = observed([random_call(1)]), observed([random_call(2, length=6)])
    assert not brief.read_keys.weight.any()
    blended = LayerStatistics.blend([full, brief])
    torch.testing.assert_close(blended.read_keys.second_moment, full.read_keys.second_moment)
    assert not torch.allclose(blended.keys.second_moment, full.keys.second_moment)
