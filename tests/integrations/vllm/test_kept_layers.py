"""Layers that keep vLLM's own cache beside packed ones: sliding windows, no transforms, `skip`."""

import pytest

pytest.importorskip("vllm.config")

import engines
from serving_models import prompts

import oscarkv
from oscarkv.errors import OscarError

STRICT = {"strict": True}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
         "full_attention"]  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Two packed layers between three that see 48 tokens."""
    return engines.TinyModel(
        tmp_path_factory.mktemp("hybrid"),
        "gemma3",
        num_hidden_layers=len(KINDS),
        layer_types=KINDS,
        sliding_window=48,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def asked():
    return prompts(5, 40, 300, 700, seed=20)


def packed(engine):
    from oscarkv.integrations.vllm.impl import OscarImpl

    return [isinstance(x.impl, OscarImpl) for x in engine.layers.values() if hasattr(x, "impl")]


def test_exact_windows_give_stock_tokens(hybrid, asked):
    with hybrid.engine() as engine:
        expected = engine.generate(asked)
    with hybrid.engine({"recent": 4096}, enable_prefix_caching=True) as engine:
        assert packed(engine) == [kind == "full_attention" for kind in KINDS]
        assert engine.generate(asked) == expected
        assert engine.generate(asked) == expected
        assert engine.cached[2:] == [224, 672]
        assert engine.used_blocks == 0


def test_small_windows_give_the_tokens_of_oscarcache(hybrid, asked):
    expected = hybrid.oracle(asked)
    for knobs in ({}, {"max_num_batched_tokens": 100, "enable_prefix_caching": True}):
        with hybrid.engine(STRICT, **knobs) as engine:
            assert engine.generate(asked) == expected
            assert [engine.generate([prompt])[0] for prompt in asked] == expected
            assert engine.used_blocks == 0


@pytest.mark.parametrize("how", ["skip", "no transforms"])
def test_full_layers(tiny_model, tmp_path, asked, how, monkeypatch):
    """The first layer keeps vLLM's cache; the second gives what it gives in `OscarCache`."""
    from oscarkv.integrations.vllm import check

    artifact = oscarkv.load_artifact(tiny_model.artifact)
    del artifact.layers[0]
    oscarkv.save_artifact(artifact, tmp_path / "second")
    cut = {"artifact": str(tmp_path / "second")}
    expected = oracle_of(tiny_model, tmp_path / "second", asked)
    assert expected != tiny_model.oracle(asked)
    options = {"skip": [0]} if how == "skip" else cut
    said = []
    monkeypatch.setattr(check.logger, "info", lambda text, *rest: said.append(text % rest))
    with tiny_model.engine(STRICT | options, enable_prefix_caching=True) as engine:
        assert packed(engine) == [False, True]
        assert engine.generate(asked) == expected
        assert engine.generate(asked) == expected
        assert engine.cached[2:] == [224, 672]
        assert engine.used_blocks == 0
    reason = "skipped" if how == "skip" else "no transforms"
    assert [line for line in said if "keep vLLM's own cache" in line] == [
        f"oscarkv: layers 0 ({reason}) keep vLLM's own cache"
    ]


def oracle_of(model, artifact, asked):
    kept, model.artifact = model.artifact, artifact
    try:
        return model.oracle(asked)
    finally:
        model.artifact = kept


def test_nothing_left_to_pack(tiny_model):
    for skip, message in (([0, 1], "no layer is left to pack"), ([7], r"skip \[7\]")):
        with pytest.raises(OscarError, match=message), tiny_model.engine({"skip": skip}):
            pass


def test_a_packed_cache_is_no_other_layers():
    """Layers that share a cache: stock attention must not read packed pages."""
    from oscarkv.integrations.vllm.kept import require_readable

    packed = {"model.layers.1.attn": None, "model.layers.1.attn.oscarkv_windows": None}
    require_readable(None, packed)
    require_readable("model.layers.0.attn", packed)
    with pytest.raises(OscarError, match=r'"skip": \[1\]'):
        require_readable("model.layers.1.attn", packed)


def test_flash_attention_does_not_plan_ahead(monkeypatch):
    """Its plans do not fit what graphs have captured of layers with windows alone."""
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend,
        FlashAttentionMetadataBuilder,
    )

    from oscarkv.integrations.vllm.kept import planning_in_the_kernel

    def init(self, *arguments, **named):
        self.aot_schedule, self.seen = True, (arguments, named)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", init)
    kept = planning_in_the_kernel(FlashAttentionBackend)
    assert issubclass(kept, FlashAttentionBackend)
    assert kept.get_name() == "FLASH_ATTN"
    assert kept.full_cls_name()[1] == "KeptFlashAttentionBackend"  # a name for each kind
    builder = kept.get_builder_cls()("spec", device="cuda")
    assert builder.seen == (("spec",), {"device": "cuda"})
    assert isinstance(builder, FlashAttentionMetadataBuilder)
    assert builder.aot_schedule is False
