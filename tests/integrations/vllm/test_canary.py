"""The canary's measure, in vLLM's CPU engine: what it says, and that it leaves no trace."""

import dataclasses

import pytest

pytest.importorskip("vllm.config")

import tiny
import torch
from serving_models import prompts
from test_vllm_refusals import config

import oscarkv
from oscarkv.errors import OscarError
from oscarkv.evaluation.fidelity import _hidden_states
from oscarkv.integrations.transformers.predictions import log_probabilities

ON = {"canary": {}}


def rescore(engine, tokens):
    (scores,) = engine.llm.collective_rpc("oscarkv_rescore", args=(tokens,))
    assert "error" not in scores, scores
    return scores


@pytest.fixture(scope="module")
def tokens():
    return prompts(700, seed=3)[0]


@pytest.fixture(scope="module")
def known_text():
    """The text that the tiny model was calibrated with."""
    return tiny.tokenizer()(tiny.text())["input_ids"][:384]


def test_windows_that_hold_everything_lose_nothing(tiny_model, tokens):
    with tiny_model.engine(ON | {"recent": 1024}) as engine:
        scores = rescore(engine, tokens)
    assert scores["kl"] < 1e-6
    assert scores["agreement"] == 1.0
    assert scores["tokens"] == 700


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, id="eager"),
        pytest.param({"enforce_eager": False}, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_small_windows_lose_what_oscarcache_loses(tiny_model, tokens, knobs):
    with tiny_model.engine(ON, **knobs) as engine:
        scores = rescore(engine, tokens)
    ids, model = torch.tensor([tokens]), tiny_model.model
    cache = oscarkv.OscarCache(model, tiny_model.artifact, strict=True)
    with torch.no_grad():
        exact, packed = (
            log_probabilities(model, _hidden_states(model, ids, kept, True)[-512:])
            for kept in (None, cache)
        )
    kl = (exact.exp() * (exact - packed)).sum(-1).mean()
    agreement = (exact.argmax(-1) == packed.argmax(-1)).float().mean()
    assert scores["kl"] == pytest.approx(float(kl), rel=1e-2)
    assert scores["kl"] > 0.1
    assert scores["agreement"] == pytest.approx(float(agreement), abs=0.01)


def test_layers_with_vllms_own_cache_are_exact_in_both(tiny_model, tokens):
    with tiny_model.engine(ON) as engine:
        both = rescore(engine, tokens)["kl"]
    with tiny_model.engine(ON | {"skip": [0]}) as engine:
        assert 0 < rescore(engine, tokens)["kl"] < both


def test_exact_attention():
    from oscarkv.integrations.vllm.canary.attention import exact_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(600, heads, 32) for heads in (4, 2, 2))
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    age = torch.arange(600)[:, None] - torch.arange(600)
    for window in (None, 100):
        mask = (age >= 0) & (age < (window or 600))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *rows, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        found = exact_attention(q, k, v, 0.3, None, window)
        torch.testing.assert_close(found, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
    capped = exact_attention(q, k, v, 0.3, 1e-6, None)  # all logits are alike
    mean = v.cumsum(0) / torch.arange(1, 601)[:, None, None]
    torch.testing.assert_close(capped[:, ::2], mean, atol=1e-4, rtol=1e-4)


def test_which_positions_are_scored():
    from oscarkv.integrations.vllm.canary.worker import first_scored

    assert first_scored(2048, 320) == 1536  # the last 512
    assert first_scored(400, 320) == 320  # those that read something packed
    assert first_scored(300, 320) == 0


def test_drift_is_small_on_the_calibration_text_only(tiny_model, known_text, tokens, tmp_path):
    from oscarkv.integrations.vllm.canary.options import CanaryOptions

    limit = CanaryOptions().drift
    with tiny_model.engine(ON) as engine:
        assert rescore(engine, known_text)["drift"] < limit
    moved = oscarkv.load_artifact(tiny_model.artifact)
    for layer in moved.layers.values():
        layer.key_mean += 2 * layer.key_mean.abs().amax()
    oscarkv.save_artifact(moved, tmp_path / "moved")
    with tiny_model.engine(ON | {"artifact": str(tmp_path / "moved")}) as engine:
        assert rescore(engine, known_text)["drift"] > limit


def test_no_block_is_touched_and_tokens_stay(tiny_model, tokens):
    asked, strict = prompts(300, 40), {"strict": True}  # else prefix hits change answers
    with tiny_model.engine(strict) as engine:
        expected = engine.generate(asked)
    with tiny_model.engine(ON | strict, enable_prefix_caching=True) as engine:
        assert engine.generate(asked) == expected
        impls = {name: getattr(layer, "impl", None) for name, layer in engine.layers.items()}
        caches = {name: layer.kv_cache.clone() for name, layer in engine.layers.items()}
        free = engine.manager.block_pool.get_num_free_blocks()
        rescore(engine, tokens)
        assert engine.manager.block_pool.get_num_free_blocks() == free
        for name, layer in engine.layers.items():
            assert getattr(layer, "impl", None) is impls[name]
            assert torch.equal(layer.kv_cache.view(torch.uint8), caches[name].view(torch.uint8))
        assert engine.generate(asked) == expected
        assert engine.cached[0] == 224  # prefixes are still there


def test_an_error_is_an_answer(tiny_model):
    """Raised on one of several ranks, it would leave the others' answers in vLLM's queues."""
    with tiny_model.engine(ON) as engine:
        layer = next(layer for layer in engine.layers.values() if hasattr(layer, "impl"))
        impl, layer.impl.alibi_slopes = layer.impl, [1.0]
        (scores,) = engine.llm.collective_rpc("oscarkv_rescore", args=([5] * 300,))
        assert "no plain attention" in scores["error"]
        assert layer.impl is impl
        del impl.alibi_slopes
        assert rescore(engine, [5] * 300)["kl"] >= 0


@pytest.mark.parametrize(
    ("section", "knobs", "message"),
    [
        ({"shares": 1}, {}, "unknown option shares of oscarkv's canary; known: share"),
        ({"share": 2}, {}, "share is 2, not a number from 0 to 1"),
        ({"max_tokens": "many"}, {}, "max_tokens is 'many'"),
        ({"max_tokens": 300.0}, {}, "max_tokens is 300.0, not a whole number"),
        ({"max_tokens": 143}, {}, r"needs 144 tokens .*may read 143 \(max_tokens 143"),
        ({}, {"max_num_batched_tokens": 100}, "may read 100 .*--max-num-batched-tokens 100"),
        ({}, {"worker_extension_cls": "a.B"}, "canary cannot be used with --worker-extension-cls"),
        ({}, {"enable_lora": True}, "canary cannot be used with --enable-lora"),
        ({}, {"pipeline_parallel_size": 2}, "canary cannot be used with pipeline parallelism"),
    ],
)
def test_refused(tiny_model, section, knobs, message):
    with pytest.raises(OscarError, match=message):
        config(tiny_model, {"canary": section}, **knobs)


def test_just_enough_tokens(tiny_model):
    """Sink 16, recent 64, and 64 positions that read something packed."""
    assert config(tiny_model, {"canary": {"max_tokens": 144}})


def test_off_unless_asked_for(tiny_model):
    assert config(tiny_model, {}).parallel_config.worker_extension_cls == ""
    assert "CanaryWorker" in config(tiny_model, ON).parallel_config.worker_extension_cls


class TestReport:
    @pytest.fixture
    def lines(self, monkeypatch):
        from oscarkv.integrations.vllm.canary import report

        said = []
        for level in ("warning", "info"):
            monkeypatch.setattr(
                report.logger, level, lambda text, *a, level=level: said.append((level, text % a))
            )
        return said

    def test_a_line_where_a_threshold_is_crossed(self, lines):
        from oscarkv.integrations.vllm.canary.options import CanaryOptions
        from oscarkv.integrations.vllm.canary.report import WINDOW, Report, Score

        report = Report(CanaryOptions(), "crossing")
        good, bad = Score(0.01, 0.98, 1.1, 0.5), Score(0.5, 0.98, 1.1, 0.5)
        report.add(good)
        assert not lines
        for _ in range(3):  # one line, not three
            report.add(bad)
        assert [level for level, _ in lines] == ["warning"]
        assert "kl 0.255, threshold 0.1 (mean of 2 rescored requests to crossing)" in lines[0][1]
        for _ in range(WINDOW):
            report.add(good)
        assert [level for level, _ in lines] == ["warning", "info"]
        report.add(dataclasses.replace(good, agreement=0.0, kl=float("nan")))
        assert len(lines) == 3  # NaN is never good; 19 of 20 agree
        assert "kl nan" in lines[2][1]

    def test_metrics(self, lines):
        from prometheus_client import REGISTRY

        from oscarkv.integrations.vllm.canary.options import CanaryOptions
        from oscarkv.integrations.vllm.canary.report import Report, Score

        def value(name):
            return REGISTRY.get_sample_value(f"oscarkv:canary_{name}", {"model_name": "metrics"})

        report = Report(CanaryOptions(), "metrics")
        assert value("requests_total") == 0
        assert value("kl") is None
        report.add(Score(0.01, 0.98, None, 0.5))
        report.add(Score(0.03, 0.96, 1.2, 0.25))
        assert value("requests_total") == 2
        assert value("seconds_total") == 0.75
        assert value("kl") == pytest.approx(0.02)
        assert value("agreement") == pytest.approx(0.97)
        assert value("drift") == pytest.approx(1.2)

    def test_ranks(self):
        from oscarkv.integrations.vllm.canary.report import Score

        first = {"kl": 0.1, "agreement": 0.9, "drift": 1.1, "seconds": 1.0}
        other = {"kl": None, "agreement": None, "drift": 1.3, "seconds": 2.0}
        assert Score.of_ranks([first, other]) == Score(0.1, 0.9, 1.3, 2.0)
