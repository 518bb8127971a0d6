"""Every supported architecture: calibrate, save, load, generate; and its RoPE as we turn it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations import tiny

import oscarkv
from oscarkv.errors import UnsupportedModelError
from oscarkv.integrations.transformers.attention import attention_implementation, observing
from oscarkv.integrations.transformers.geometry import describe, rope_turns


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_from_text_to_generation(name: str, tmp_path: Path) -> None:
    model, artifact = tiny.model(name), tiny.calibrated(name)
    oscarkv.save_artifact(artifact, tmp_path / "a.safetensors")
    ids = tiny.tokens(2, 40)
    expected = tiny.greedy(model, ids)

    cache = oscarkv.OscarCache(model, tmp_path / "a.safetensors")
    out = tiny.greedy(model, ids, past_key_values=cache)
    assert out.shape == expected.shape
    assert torch.equal(out[:, :41], expected[:, :41])  # a prompt read whole is exact
    assert cache.get_seq_length() == 51
    assert cache.pages.lengths == [51, 51]
    # What is read is packed: more of it than the windows could hold.
    assert artifact.recipe.sink + artifact.recipe.recent < 40
    again = tiny.greedy(model, ids, past_key_values=oscarkv.OscarCache(model, artifact))
    assert torch.equal(out, again)  # what is saved is what was made


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_token_identical_with_large_windows(name: str) -> None:
    model, ids = tiny.model(name), tiny.tokens(1, 40)
    expected = tiny.greedy(model, ids)
    cache = oscarkv.OscarCache(model, tiny.calibrated(name, windows="large"))
    assert torch.equal(tiny.greedy(model, ids, past_key_values=cache), expected)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_decode_agrees_with_strict_prefill(name: str) -> None:
    """The packed path with this architecture's scale, heads and windows."""
    model, artifact, ids = tiny.model(name), tiny.calibrated(name), tiny.tokens(1, 52)
    whole = tiny.logits(model, ids, oscarkv.OscarCache(model, artifact, strict=True))
    steps = tiny.decode_logits(model, ids, oscarkv.OscarCache(model, artifact, strict=True), 10)
    exact = tiny.logits(model, ids)
    tiny.assert_same_rows(steps, whole)
    assert (whole - exact).abs().max() > 1e-2  # something was quantised


def _keys(model: Any, ids: torch.Tensor, start: int) -> dict[int, torch.Tensor]:
    keys: dict[int, torch.Tensor] = {}

    def observer(module: Any, q: Any, k: torch.Tensor, *rest: Any) -> None:
        keys[module.layer_idx] = k[0].double()

    positions = torch.arange(start, start + ids.shape[1])[None]
    with attention_implementation(model), observing(observer), torch.no_grad():
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return keys


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_rope_turns_are_the_models_own(name: str) -> None:
    """Keys of the same text further on are the keys, turned."""
    model, ids = tiny.model(name), tiny.tokens(1, 20)
    dim = describe(model).identity.head_dim
    offsets = torch.tensor([0, 1, 37, 600])
    here = _keys(model, ids, 0)
    for layer, keys in here.items():
        turns = rope_turns(model, layer, dim, offsets)
        if turns is None:  # no RoPE: nothing turns
            turns = torch.eye(dim, dtype=torch.float64).repeat(len(offsets), 1, 1)
        for offset, turn in zip(offsets.tolist(), turns, strict=True):
            there = _keys(model, ids, offset)[layer]
            # fp32 angles: a position of 600 is off by 600 * 2^-24 and that turns the key
            torch.testing.assert_close(there, keys @ turn, atol=3e-3, rtol=0)


def test_layers_without_rope_do_not_turn() -> None:
    model = tiny.model("smollm3")  # layer 1 has no RoPE
    offsets = torch.tensor([0, 5])
    assert rope_turns(model, 0, 32, offsets) is not None
    assert rope_turns(model, 1, 32, offsets) is None


def test_partial_rotation_leaves_the_rest() -> None:
    turns = rope_turns(tiny.model("glm4"), 0, 32, torch.tensor([0, 5]))
    assert turns is not None
    torch.testing.assert_close(turns[1, 16:, 16:], torch.eye(16).double())
    assert not torch.allclose(turns[1, :16, :16], torch.eye(16).double())


def test_sliding_layers_need_asking() -> None:
    model = tiny.model("gemma3")
    assert sorted(tiny.quick_calibrate(model).layers) == [1]
    assert sorted(tiny.quick_calibrate(model, quantize_sliding=True).layers) == [0, 1, 2]
    only = tiny.quick_calibrate(model, quantize_sliding=True, skip_layers=[1])
    assert sorted(only.layers) == [0, 2]
    assert only.calibration["skipped_layers"] == [1]
    with pytest.raises(UnsupportedModelError, match=r"sliding_attention.*--quantize-sliding"):
        tiny.quick_calibrate(tiny.model("mistral-sliding"))


@pytest.mark.parametrize("skipped", [[], [0], [2], [1]])
@pytest.mark.parametrize("windows", [tiny.SMALL, tiny.LARGE])
def test_quantised_and_stock_sliding_layers_side_by_side(
    skipped: list[int], windows: dict[str, int]
) -> None:
    """Some layers of a kind packed, others not: they cut the same mask differently."""
    model, ids = tiny.model("gemma3"), tiny.tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = tiny.greedy(model, ids, attention_mask=mask)
    small = tiny.quick_calibrate(model, quantize_sliding=True, skip_layers=skipped)
    recipe = small.recipe.replace(**windows)
    artifact = oscarkv.Artifact(small.model, recipe, small.layers)
    out = tiny.greedy(
        model, ids, attention_mask=mask, past_key_values=oscarkv.OscarCache(model, artifact)
    )
    if windows == tiny.LARGE:
        assert torch.equal(out, expected)
    whole = tiny.logits(model, ids, oscarkv.OscarCache(model, artifact, strict=True))
    steps = tiny.decode_logits(model, ids, oscarkv.OscarCache(model, artifact, strict=True), 10)
    tiny.assert_same_rows(steps, whole)


def test_models_with_learned_sinks_are_refused() -> None:
    """gpt-oss adds a learned logit to every softmax, which SDPA would silently leave out."""
    config = transformers.GptOssConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=1024,
        layer_types=["full_attention"] * 2,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="GptOss"):
        tiny.quick_calibrate(model)
    assert model.config._attn_implementation == before


def test_soft_caps_are_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        layer_types=["full_attention"] * 2,
    )
    with pytest.raises(UnsupportedModelError, match=r"caps its logits|no SDPA for it"):
        tiny.quick_calibrate(transformers.Gemma2ForCausalLM(config).eval())
