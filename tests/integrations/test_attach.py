"""attach, fold, detach: what changes in a model, and that all of it can be undone."""

from pathlib import Path

import pytest
import torch
from integrations import tiny
from torch import nn

import oscarkv
from oscarkv import Artifact, OscarCache, attach
from oscarkv.errors import CacheError, ModelMismatchError, UnsupportedModelError

FOLDABLE = ("llama", "llama-96", "qwen2", "qwen3", "qwen3-moe", "glm4", "gemma3", "smollm3")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], attention: str) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", FOLDABLE)
@pytest.mark.parametrize("recipe", ["uniform", "paper"])
def test_folding_keeps_the_function(name: str, recipe: str) -> None:
    model, artifact, ids = tiny.model(name), tiny.calibrated(name, recipe), tiny.tokens(1, 52)
    before, attention = state(model), model.config._attn_implementation
    exact = tiny.logits(model, ids)
    packed = tiny.logits(model, ids, OscarCache(model, artifact, strict=True))

    attachment = attach(model, artifact, fold_values=True)
    assert attachment.folded
    folded = tiny.logits(model, ids)
    assert (folded - exact).norm() < 1e-3 * exact.norm()
    assert not torch.equal(folded, exact)

    cache = OscarCache(model, artifact, strict=True)
    assert cache.pages.layers[0].transforms.value is None
    whole = tiny.logits(model, ids, cache)
    # The same codes but for those that another rounding tips over.
    assert (whole - packed).norm() < 0.05 * (packed - exact).norm()
    steps = tiny.decode_logits(model, ids, OscarCache(model, artifact, strict=True), 10)
    assert (steps - whole).norm() < 0.2 * (packed - exact).norm()

    attachment.detach()
    assert_untouched(model, before, attention)
    assert torch.equal(tiny.logits(model, ids), exact)


def test_folded_models_generate() -> None:
    model, ids = tiny.model(), tiny.tokens(1, 30)
    expected = tiny.greedy(model, ids)
    artifact = tiny.calibrated(windows="large")
    attach(model, artifact, fold_values=True)
    out = tiny.greedy(model, ids, past_key_values=OscarCache(model, artifact))
    assert torch.equal(out[:, :31], expected[:, :31])
    assert torch.equal(out, tiny.greedy(model, ids))


def test_the_same_file_may_be_read_twice(tmp_path: Path) -> None:
    model, path = tiny.model(), tmp_path / "a.safetensors"
    oscarkv.save_artifact(tiny.calibrated(), path)
    first = attach(model, path, fold_values=True)
    assert attach(model, path) is first
    cache = OscarCache(model, path)
    assert cache.pages.layers[0].transforms.value is None
    other = tiny.quick_calibrate(tiny.model(), seed=1, tokens=300)
    with pytest.raises(UnsupportedModelError, match="another artifact's values"):
        attach(model, other)
    first.detach()
    attach(model, other)


def test_attaching_twice_changes_nothing() -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    attention = model.config._attn_implementation
    before = state(model)
    first = attach(model, artifact)
    assert attach(model, artifact) is first
    second = attach(model, tiny.calibrated(recipe="paper"))
    assert second.previous == attention
    second.detach()
    assert_untouched(model, before, attention)


def test_caches_notice_that_values_were_folded_or_unfolded() -> None:
    model, artifact, ids = tiny.model(), tiny.calibrated(), tiny.tokens(1, 30)
    cache = OscarCache(model, artifact)
    tiny.logits(model, ids, cache)
    attachment = attach(model, artifact, fold_values=True)
    with pytest.raises(CacheError, match="folded"):
        tiny.logits(model, ids[:, :1], cache)
    cache = OscarCache(model, artifact)
    tiny.logits(model, ids, cache)
    attachment.detach()
    with pytest.raises(CacheError, match="no longer goes through oscarkv"):
        tiny.logits(model, ids[:, :1], cache)
    with pytest.raises(CacheError, match="no longer goes through oscarkv"):
        tiny.greedy(model, ids, past_key_values=cache)


def test_fused_projections_are_refused() -> None:
    model, artifact = tiny.model("phi3"), tiny.calibrated("phi3")
    before, attention = state(model), model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .*v_proj \(missing\)"):
        attach(model, artifact, fold_values=True)
    assert_untouched(model, before, attention)


class QuantisedLinear(nn.Linear):
    """Looks like a linear layer, is one of a quantisation library."""


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
def test_quantised_linears_are_refused(name: str) -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    module = model.model.layers[1].self_attn  # the last one: the first must not be folded either
    linear = getattr(module, name)
    fake = QuantisedLinear(linear.in_features, linear.out_features, bias=False)
    fake.weight = linear.weight
    setattr(module, name, fake)
    before, attention = state(model), model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=rf"layer 1: .*{name} \(QuantisedLinear\)"):
        attach(model, artifact, fold_values=True)
    assert_untouched(model, before, attention)


def test_other_models_are_refused() -> None:
    artifact = tiny.calibrated()
    for other, what in (
        (tiny.model(num_hidden_layers=3), "layers"),
        (tiny.model(num_attention_heads=8), "query_heads"),
        (tiny.model(num_key_value_heads=1), "kv_heads"),
        (tiny.model(head_dim=64), "head_dim"),
        (tiny.model("llama-yarn"), "rope"),
        (tiny.model("mistral"), "architecture"),
        (tiny.model(seed=1), "has others"),
    ):
        attention = other.config._attn_implementation
        with pytest.raises(ModelMismatchError, match=what):
            OscarCache(other, artifact)
        assert other.config._attn_implementation == attention


@pytest.mark.parametrize("moved", [[0], [1], [0, 1]])
def test_models_on_several_devices_are_refused(moved: list[int]) -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    attention = model.config._attn_implementation
    for index in moved:
        model.model.layers[index].to("meta")
    what = rf"layer {moved[0]} .* is on meta, the cache would be on cpu; .* device_map"
    for use in (OscarCache, attach):
        with pytest.raises(UnsupportedModelError, match=what):
            use(model, artifact)
    assert model.config._attn_implementation == attention


def test_a_model_that_is_moved_after_it_was_attached_is_refused() -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    attach(model, artifact)
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* is on meta"):
        OscarCache(model, artifact)


def test_what_is_no_layer_may_be_on_another_device() -> None:
    model = tiny.model()
    model.add_module("vision", nn.Linear(4, 4, device="meta"))
    OscarCache(model, tiny.calibrated())


def test_the_same_weights_in_bfloat16_are_the_same_model() -> None:
    attach(tiny.model(dtype=torch.bfloat16), tiny.calibrated())


def test_a_folded_model_is_not_calibrated() -> None:
    model, artifact = tiny.model(), tiny.calibrated()
    attachment = attach(model, artifact, fold_values=True)
    with pytest.raises(UnsupportedModelError, match="detach"):
        tiny.quick_calibrate(model)
    attachment.detach()
    again = tiny.quick_calibrate(model)
    assert isinstance(again, Artifact)
    assert torch.equal(again.layers[0].key, artifact.layers[0].key)
