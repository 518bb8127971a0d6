"""Layers without keys and values: the states of hybrid models beside packed layers, and MLA, which
leaves nothing to pack."""

import dataclasses

import pytest

pytest.importorskip("vllm.config")

import engines
import transformers
from serving_models import SINK, prompts

from oscarkv.errors import OscarError
from oscarkv.integrations.vllm import check

STRICT = {"strict": True}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Mamba, attention, Mamba, attention; a state takes several pages."""
    return engines.TinyModel(tmp_path_factory.mktemp("hybrid"), "granite-hybrid", head_dim=32)


@pytest.fixture(scope="module")
def asked():
    return prompts(5, 40, 300, 700, 1900, seed=20)


@pytest.fixture(scope="module")
def stock_tokens(hybrid, asked):
    with hybrid.engine() as engine:
        return engine.generate(asked)


@pytest.fixture
def said(monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            check.logger, level, lambda text, *rest, level=level: lines.append((level, text % rest))
        )
    return lines


def agree_with_oscarcache(model, asked, made):
    """Tokens that are `OscarCache`'s, or nearly as likely there. States are computed in another
    order here than in Transformers, and what that rounds differently tips a 2-bit code now and
    then: weights changed by 1e-6 part `OscarCache` from itself as often. Answers of an exact cache
    are some nats away."""
    pairs = {(tuple(prompt), tuple(answer)) for prompt, answer in zip(asked, made, strict=True)}
    doubts = model.doubts([list(prompt) for prompt, _ in pairs], [list(x) for _, x in pairs])
    return max(doubts) < 1


def specs(engine):
    """Of each kind of group, one."""
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return {type(group.kv_cache_spec).__name__: group.kv_cache_spec for group in groups}


def packed(engine):
    from oscarkv.integrations.vllm.impl import OscarImpl

    layers = engine.layers.items()
    return [
        int(name.split(".")[2])
        for name, layer in layers
        if isinstance(getattr(layer, "impl", None), OscarImpl)
    ]


def test_exact_windows_give_stock_tokens(hybrid, asked, stock_tokens, said):
    with hybrid.engine({"recent": 4096}) as engine:
        assert packed(engine) == [1, 3]
        assert engine.generate(asked) == stock_tokens
        assert [engine.generate([prompt])[0] for prompt in asked] == stock_tokens
        assert engine.used_blocks == 0
        found = specs(engine)
    assert {spec.page_size_bytes for spec in found.values()} == {9 * 8192}
    assert found["MambaSpec"].real_page_size_bytes == 70144
    assert found["FullAttentionSpec"].block_size == 9 * found["FullAttentionSpec"].tokens_per_state
    assert found["WindowSpec"].block_size == 9 * 16
    (line,) = [text for _, text in said if "keep vLLM's own cache" in text]
    assert line == (
        "oscarkv: layers 0, 2 (state-space) keep vLLM's own cache; a state takes 9 pages, so "
        "blocks hold 1728 packed or 144 exact tokens"
    )


def test_small_windows_give_the_tokens_of_oscarcache(hybrid, asked, stock_tokens):
    assert min(hybrid.doubts(asked[2:], stock_tokens[2:])) > 2  # where something is packed
    for knobs in ({}, {"max_num_batched_tokens": 100}):
        with hybrid.engine(STRICT, **knobs) as engine:
            made = engine.generate(asked)
            alone = [engine.generate([prompt])[0] for prompt in asked]
            assert engine.used_blocks == 0
        assert agree_with_oscarcache(hybrid, asked * 2, made + alone)


def test_blocks_are_used_again(hybrid, asked):
    """Ten requests wait for the memory of three; blocks of states become pages, and back."""
    many = [asked[i] for i in (4, 2, 3, 4, 1, 2, 4, 0, 3, 4)]
    knobs = {"num_gpu_blocks_override": 31, "max_num_batched_tokens": 256}
    with hybrid.engine(STRICT, **knobs) as engine:
        made = [answer for _ in range(3) for answer in engine.generate(many)]
        assert engine.used_blocks == 0
    assert agree_with_oscarcache(hybrid, many * 3, made)


def test_small_states(tmp_path):
    """Less than a page: it is the state that is padded, blocks are as ever."""
    shape = {"head_dim": 64, "mamba_d_head": 64, "mamba_d_state": 4}
    model = engines.TinyModel(tmp_path, "granite-hybrid", **shape)
    asked = prompts(30, 400, seed=21)
    with model.engine(STRICT) as engine:
        made, found = engine.generate(asked), specs(engine)
        assert found["WindowSpec"].block_size == 16
        assert found["MambaSpec"].page_size_bytes > found["MambaSpec"].real_page_size_bytes
    assert agree_with_oscarcache(model, asked, made)


def test_a_layer_of_its_own_beside_states(hybrid, asked, stock_tokens, said):
    """One of the attention layers keeps vLLM's cache too, in blocks that are as large."""
    with hybrid.engine({"skip": [1], "recent": 4096}) as engine:
        assert packed(engine) == [3]
        assert engine.generate(asked) == stock_tokens
    assert any("layers 0, 2 (state-space); 1 (skipped) keep vLLM's own" in text for _, text in said)


def test_no_prefix_cache(hybrid, said):
    """Off where vLLM's default is on, with a line."""
    with hybrid.engine({}, enable_prefix_caching=None) as engine:
        config = engine.llm.llm_engine.vllm_config
        assert not config.cache_config.enable_prefix_caching
        assert config.cache_config.mamba_cache_mode == "none"
    assert any("no prefix caching" in text for _, text in said)


OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}


@pytest.mark.parametrize(
    ("options", "knobs", "message"),
    [
        ({}, {"enable_prefix_caching": True}, "--enable-prefix-caching"),
        ({}, {"kv_transfer_config": OFFLOAD}, "needs the prefix cache"),
        ({"canary": {}}, {}, "the canary"),
    ],
    ids=["prefix caching", "offload", "canary"],
)
def test_refused_beside_states(hybrid, options, knobs, message):
    with pytest.raises(OscarError, match=message), hybrid.engine(options, **knobs):
        pass


def test_memory_of_one_sequence(hybrid):
    """What is refused does not fit, and what is named does; a state is one block."""
    knobs = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 10}
    with pytest.raises(OscarError, match="too little memory") as caught, hybrid.engine({}, **knobs):
        pass
    fits = int(str(caught.value).rpartition(" ")[2])
    assert SINK < fits < 2048
    with hybrid.engine({}, **knobs, max_model_len=fits) as engine:
        assert len(engine.generate(prompts(fits - 4), 4)[0]) == 4


def test_larger_blocks_without_states_are_refused(hybrid):
    """Prefix hits know blocks of 16 exact tokens alone."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

    from oscarkv.integrations.vllm.settings import Settings
    from oscarkv.integrations.vllm.windows import SUFFIX, WindowLayer

    settings = Settings(str(hybrid.artifact))
    window = WindowLayer(2, 32, torch.float32, 16, 64, 192).spec
    window = dataclasses.replace(window, block_size=32)
    other = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32)
    state = MambaSpec(block_size=2048, shapes=((4,),), dtypes=(torch.float32,))
    for kept, padding, fits in [(state, None, True), (other, None, False), (state, 99999, False)]:
        spec = dataclasses.replace(window, page_size_padded=padding)
        known = {"layers.0.x": kept, "layers.1.attn": other, "layers.1.attn" + SUFFIX: spec}
        groups = [KVCacheGroupSpec(["layers.1.attn" + SUFFIX], spec)]
        if fits:
            line = check.check_layers(settings, known, groups)
            assert line.endswith("2 pages, so blocks hold 384 packed or 32 exact tokens")
        else:
            with pytest.raises(OscarError, match="blocks are larger where layers 0"):
                check.check_layers(settings, known, groups)


# -- MLA -------------------------------------------------------------------------------------------


class LatentModel(engines.TinyModel):
    """DeepSeek-V2's attention, in the one shape that vLLM has a CPU kernel for."""

    def __init__(self, folder):
        import tiny
        import torch

        self.path, self.artifact = folder / "model", folder / "there is none"
        torch.manual_seed(0)
        config = transformers.DeepseekV2Config(
            vocab_size=len(tiny.VOCABULARY),
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            head_dim=64,
            first_k_dense_replace=2,
            max_position_embeddings=4096,
            initializer_range=0.15,
        )
        model = transformers.DeepseekV2ForCausalLM(config).eval()
        model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(self.path)


def test_mla_is_left_to_vllm(tmp_path, said):
    """With the options of a server that packs, and an artifact that cannot exist."""
    model, asked = LatentModel(tmp_path), prompts(5, 300, seed=22)
    with model.engine() as engine:
        expected = engine.generate(asked)
        stock = {name: type(layer.impl) for name, layer in engine.layers.items()}
    assert not said
    with model.engine({}, attention_backend="CUSTOM") as engine:
        config = engine.llm.llm_engine.vllm_config
        assert config.attention_config.backend is None
        assert {name: type(layer.impl) for name, layer in engine.layers.items()} == stock
        assert engine.generate(asked) == expected
    ((level, line),) = said
    assert level == "warning"
    assert line.startswith("oscarkv: nothing is packed, and the artifact is not used")
    assert "are MLA" in line
