"""Calibration of whole models: seeds, documents, progress, and every way to be refused."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from integrations import tiny

from oscarkv import Artifact, OscarCache, Recipe
from oscarkv.calibration import statistics
from oscarkv.calibration.general import general_texts
from oscarkv.errors import CalibrationError, UnsupportedModelError
from oscarkv.integrations.transformers import calibrate as calibration
from oscarkv.integrations.transformers import passes
from oscarkv.integrations.transformers.calibrate import calibrate, calibrate_many
from oscarkv.integrations.transformers.text import (
    again,
    cut_sequences,
    echoes,
    general_sequences,
    text_sha256,
)

UNIFORM = Recipe.named("uniform", **tiny.SMALL)


def same(one: Artifact, other: Artifact) -> bool:
    return one.layers.keys() == other.layers.keys() and all(
        torch.equal(tensor.nan_to_num(), other.layers[index].tensors()[name].nan_to_num())
        for index, layer in one.layers.items()
        for name, tensor in layer.tensors().items()
    )


def run(model: Any, texts: list[str], **options: Any) -> Artifact:
    knobs: dict[str, Any] = {"recipe": UNIFORM, "tokens": 400, "length": 96, "target_length": 512}
    return calibrate(model, tiny.tokenizer(), texts, **(knobs | options))


def test_a_seed_gives_one_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PAIR_QUERIES", 16)  # so that there is something to draw
    model = tiny.model()
    first = run(model, [tiny.text()])
    assert same(first, run(model, [tiny.text()]))
    assert same(first, run(tiny.model(), [tiny.text()]))
    assert not same(first, run(model, [tiny.text()], seed=1))
    assert first.calibration["seed"] == 0


def test_calibrating_leaves_the_model_alone() -> None:
    model, ids = tiny.model(), tiny.tokens(1, 20)
    before, attention = tiny.logits(model, ids), model.config._attn_implementation
    run(model, [tiny.text()])
    assert model.config._attn_implementation == attention
    assert torch.equal(tiny.logits(model, ids), before)


def test_documents_and_their_order() -> None:
    model = tiny.model()
    # 96-token sequences with 12 documents: none is cut short, none reads another.
    documents = [tiny.text(96, seed=seed) for seed in range(12)]
    held_back = documents[-1:]  # the last one is for the self-check
    apart = run(model, documents, tokens=96 * 12)
    assert apart.calibration["sequences"] == 12
    turned = run(model, [*documents[-2::-1], *held_back], tokens=96 * 12)
    together = run(model, ["".join(documents)], tokens=96 * 12, length=192)
    for index in apart.layers:
        torch.testing.assert_close(
            apart.layers[index].key_mean, turned.layers[index].key_mean, rtol=1e-4, atol=1e-4
        )
        assert not torch.allclose(
            apart.layers[index].key_mean, together.layers[index].key_mean, rtol=1e-3, atol=1e-3
        )


def test_one_text_is_one_document() -> None:
    model = tiny.model()
    assert same(run(model, [tiny.text()]), run(model, tiny.text()))  # type: ignore[arg-type]


def test_recipes_together_are_as_alone() -> None:
    model = tiny.model()
    recipes = [Recipe.named(n, **tiny.SMALL) for n in ("uniform", "paper", "quarot-int2", "bf16")]
    recipes.append(recipes[0].replace(name="wide", recent=16))
    knobs: dict[str, Any] = {"tokens": 400, "length": 96, "target_length": 512}
    found = calibrate_many(model, tiny.tokenizer(), [tiny.text()], recipes=recipes, **knobs)
    assert [artifact.recipe for artifact in found] == recipes
    for artifact in found:
        assert same(artifact, run(model, [tiny.text()], recipe=artifact.recipe))


def test_progress_counts_to_the_end() -> None:
    calls: list[tuple[int, int, str]] = []
    recipe = Recipe.named("paper", **tiny.SMALL)
    run(tiny.model(), [tiny.text()], recipe=recipe, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]
    assert {call[2] for call in calls} == {"statistics", "score weights", "self-check"}


def test_positions_are_averaged_up_to_the_target() -> None:
    model = tiny.model()
    near = run(model, [tiny.text()], target_length=96)
    far = run(model, [tiny.text()], target_length=1024)
    assert not torch.equal(near.layers[0].key, far.layers[0].key)
    assert far.calibration["target_length"] == 1024
    assert same(far, run(model, [tiny.text()], target_length=None))


def test_skip_layers() -> None:
    model = tiny.model(num_hidden_layers=3)
    artifact = run(model, [tiny.text()], skip_layers=[1])
    assert sorted(artifact.layers) == [0, 2]
    ids = tiny.tokens(1, 40)
    out = tiny.greedy(model, ids, past_key_values=OscarCache(model, artifact))
    assert out.shape == (1, 52)
    with pytest.raises(UnsupportedModelError, match=r"cannot skip layer 3: .* has layers 0 to 2"):
        run(model, [tiny.text()], skip_layers=[3])
    with pytest.raises(UnsupportedModelError, match="no layer is left"):
        run(model, [tiny.text()], skip_layers=[0, 1, 2])


# -- refusals ------------------------------------------------------------------------------------


def test_too_little_text() -> None:
    with pytest.raises(CalibrationError, match=r"96 usable tokens .* at least 192 .* KB of text"):
        run(tiny.model(), [tiny.text(100)])
    with pytest.raises(CalibrationError, match="0 usable tokens"):
        run(tiny.model(), ["a few words", "and some more"])
    with pytest.raises(CalibrationError, match="0 usable tokens"):
        run(tiny.model(), [])


def test_lengths_beyond_the_context() -> None:
    model = tiny.model()
    with pytest.raises(CalibrationError, match=r"--length 2048 .*\(1024 tokens\)"):
        run(model, [tiny.text()], length=2048)
    with pytest.raises(CalibrationError, match=r"--target-length 2048 .*\(1024 tokens\)"):
        run(model, [tiny.text()], target_length=2048)
    with pytest.raises(CalibrationError, match="too short"):
        run(model, [tiny.text()], length=1)
    short = tiny.model(max_position_embeddings=128)  # the default is cut to the context
    artifact = calibrate(short, tiny.tokenizer(), [tiny.text()], recipe=UNIFORM, tokens=400)
    assert artifact.calibration["length"] == 128


def test_windows_longer_than_the_sequences() -> None:
    with pytest.raises(CalibrationError, match=r"layer 0: no key was ever read .*--length"):
        run(tiny.model(), [tiny.text()], recipe=Recipe(), length=96)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_activations_that_are_not_finite(name: str) -> None:
    model = tiny.model()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).weight[3, 5] = torch.nan
    kind = {"q": "queries", "k": "keys", "v": "values"}[name[0]]
    with pytest.raises(CalibrationError, match=f"layer 1: NaN or infinite {kind}"):
        run(model, [tiny.text()])
    assert model.config._attn_implementation == "sdpa"  # put back all the same


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_heads_that_do_not_vary(name: str) -> None:
    model = tiny.model("qwen2", num_key_value_heads=2)
    linear = getattr(model.model.layers[1].self_attn, name)
    with torch.no_grad():
        linear.weight[32:] = 0
        if name == "k_proj":  # RoPE turns a bias
            linear.bias[32:] = 0
    with pytest.raises(CalibrationError, match=r"layer 1, KV head 1: .* do not vary"):
        run(model, [tiny.text()])
    assert sorted(run(model, [tiny.text()], skip_layers=[1]).layers) == [0]


def test_latent_attention() -> None:
    config = transformers.DeepseekV2Config(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        first_k_dense_replace=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=1024,
    )
    model = transformers.DeepseekV2ForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        run(model, [tiny.text()])


def linear_attention_model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def test_linear_attention() -> None:
    model = linear_attention_model()
    with pytest.raises(UnsupportedModelError, match="layers 0, 2 use linear_attention"):
        run(model, [tiny.text()])
    artifact = run(model, [tiny.text()], skip_unsupported=True)
    assert sorted(artifact.layers) == [1]
    ids = tiny.tokens(2, 40)
    expected = tiny.greedy(model, ids)
    large = Artifact(artifact.model, artifact.recipe.replace(**tiny.LARGE), artifact.layers)
    cache = OscarCache(model, large)
    assert torch.equal(tiny.greedy(model, ids, past_key_values=cache), expected)
    assert cache.nbytes() > cache.pages.nbytes()
    cache.reset()
    assert torch.equal(tiny.greedy(model, ids, past_key_values=cache), expected)
    small = OscarCache(model, artifact)
    assert tiny.greedy(model, ids, past_key_values=small).shape == expected.shape


# -- text ----------------------------------------------------------------------------------------


def test_sequences_are_cut_within_documents() -> None:
    tokenizer = tiny.tokenizer()
    sequences = cut_sequences(["ab" * 25, "c" * 30], tokenizer, 20, shortest=8)
    decoded = [tokenizer.decode(sequence[0]) for sequence in sequences]
    assert decoded == ["ab" * 10, "ab" * 10, "ab" * 5, "c" * 20, "c" * 10]
    assert [len(x[0]) for x in cut_sequences(["ab" * 25], tokenizer, 20)] == [20, 20]


def test_general_text_counts_beside_the_given() -> None:
    model = tiny.model()
    blended, alone = run(model, [tiny.text()]), run(model, [tiny.text()], general=False)
    assert not same(blended, alone)
    assert blended.calibration["general_sha256"] == text_sha256(general_texts())
    assert "general_sha256" not in alone.calibration
    assert blended.calibration["tokens"] == alone.calibration["tokens"]


def test_published_recipes_see_the_given_text_alone() -> None:
    model, paper = tiny.model(), Recipe.named("paper-softmax", group_size=None, **tiny.SMALL)
    recipes = [UNIFORM, paper]
    knobs: dict[str, Any] = {"tokens": 400, "length": 96, "target_length": 512}
    beside = calibrate_many(model, tiny.tokenizer(), [tiny.text()], recipes=recipes, **knobs)[1]
    assert same(beside, run(model, [tiny.text()], recipe=paper, general=False))
    assert "general_sha256" not in beside.calibration


def test_general_text_makes_calibration_texts_alike() -> None:
    """Means of keys, fitted to two texts, lie closer together with it."""
    model, texts = tiny.model(), [tiny.text(seed=1), "0123456789" * 150]

    def distance(**options: Any) -> float:
        one, other = (run(model, [text], **options).layers for text in texts)
        return sum(float((one[i].key_mean - other[i].key_mean).norm()) for i in one)

    assert distance() < 0.5 * distance(general=False)


def test_general_text_is_bounded_and_echoes_repeat() -> None:
    tokenizer, texts = tiny.tokenizer(), general_texts()
    assert len(texts) == 3
    assert all(len(text) > 15000 for text in texts)
    few = general_sequences(texts, tokenizer, 1000, 100, 50)
    assert 900 < sum(sequence.shape[1] for sequence in few) <= 1000
    for sequence in echoes(texts, tokenizer, 101):
        assert sequence.shape == (1, 100)
        assert torch.equal(sequence[:, :50], sequence[:, 50:])
    odd = torch.arange(10, 21)[None]
    assert again(odd, tokenizer)[0].tolist() == [*range(10, 18), 10, 11, 12]
    assert again(odd, BeginningTokenizer())[0].tolist() == [*range(10, 18), 11, 12, 13]


class BeginningTokenizer:
    """One that puts a token before every text."""

    bos_token_id = 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *map(ord, text)]}


def test_general_text_is_left_out_where_windows_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents are short; a long recent window must not fail for that."""
    short = ("one two three " * 4,)  # 56 tokens, less than the windows
    monkeypatch.setattr(calibration, "general_texts", lambda: short)
    model, text = tiny.model(), tiny.text()
    recipe = UNIFORM.replace(recent=128)
    knobs: dict[str, Any] = {"recipe": recipe, "length": 512, "tokens": 1500}
    blended, alone = run(model, [text], **knobs), run(model, [text], general=False, **knobs)
    assert "general_sha256" not in blended.calibration
    assert same(blended, alone)


@pytest.mark.parametrize(
    ("errors", "bits", "warned"),
    [([7.0, 0.5, 0.6], 2, False), ([1.1, 1.2, 0.1], 2, True), ([1.1, 1.2, 0.1], 3, False)],
    ids=["one", "most", "most of 3 bits"],
)
def test_refined_keys_that_lose_in_most_heads_are_warned_of(
    errors: list[float], bits: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer: Any = SimpleNamespace(errors=torch.tensor([errors, [0.0] * 3]))
    check: Any = SimpleNamespace(unrefined_errors=torch.ones(3))
    with caplog.at_level(logging.INFO):
        passes._report_refining(UNIFORM.replace(key_bits=bits), {0: layer}, {0: check})
    (said,) = caplog.records
    assert (said.levelno == logging.WARNING) == warned
    assert ("refine_keys=false" in said.getMessage()) == warned
    assert f"worse in {sum(error > 1 for error in errors)} of 3 heads" in said.getMessage()
