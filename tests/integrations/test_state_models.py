"""Models with layers that keep a state instead of keys and values, calibrated for the others."""

import copy

import pytest
import tiny
import torch
from transformers import GenerationConfig

import oscarkv
from oscarkv.artifact import Artifact
from oscarkv.errors import ModelMismatchError, UnsupportedModelError
from oscarkv.integrations.serving.fit import examine
from oscarkv.integrations.serving.weights import check_weights
from oscarkv.integrations.sglang.fit import SGLANG
from oscarkv.integrations.vllm.fit import VLLM
from oscarkv.integrations.vllm.settings import Settings


@pytest.fixture(scope="module")
def model():
    return tiny.model("granite-hybrid")


@pytest.fixture(scope="module")
def artifact(model):
    return tiny.quick_calibrate(model, skip_unsupported=True)


def test_layers_are_counted_in_the_whole_model(model, artifact):
    assert sorted(artifact.layers) == [1, 3]
    assert artifact.model.layers == 4
    assert artifact.calibration["skipped_layers"] == [0, 2]
    with pytest.raises(UnsupportedModelError, match=r"layers 0, 2 use .*--skip-unsupported"):
        tiny.quick_calibrate(model)


def test_answers(model, artifact):
    """Large windows change nothing, small ones do."""
    ids = tiny.tokens(1, 120)
    expected = tiny.greedy(model, ids)
    large = Artifact(
        artifact.model, artifact.recipe.replace(**tiny.LARGE), artifact.layers, {}, "test"
    )
    exact, packed = (
        tiny.greedy(model, ids, past_key_values=oscarkv.OscarCache(model, chosen))
        for chosen in (large, artifact)
    )
    assert torch.equal(exact, expected)
    assert not torch.equal(packed, expected)


def test_what_check_says(model, artifact, tmp_path):
    model.generation_config = GenerationConfig()
    model.save_pretrained(tmp_path / "model")
    oscarkv.save_artifact(artifact, tmp_path / "artifact")
    settings = Settings(str(tmp_path / "artifact"))
    fit = examine(VLLM, str(tmp_path / "model"), settings, dtype="bfloat16")
    said = {finding.what: finding for finding in fit.findings}
    assert fit.good
    assert said["layers"].text.startswith("2 of 4 are packed; layers 0, 2 (")
    assert said["layers"].text.endswith("vLLM's own cache")
    assert "in blocks as large as a state" in said["cache"].text
    assert "not foretold" in said["capacity"].text
    assert "bits_per_element" not in fit.figures
    refused = examine(SGLANG, str(tmp_path / "model"), settings, dtype="bfloat16")
    assert not refused.good


def test_norms_of_states_are_split_over_ranks(model, artifact):
    """A rank's share may be as wide as the hidden size; it is compared with nothing."""
    rank = copy.deepcopy(model)
    states = {type(module) for module in rank.modules() if hasattr(module, "conv1d")}
    (inner,) = {p for n, p in rank.named_parameters() if n.endswith("0.mamba.norm.weight")}
    inner.data.neg_()
    widths = {model.config.hidden_size, inner.numel()}
    with pytest.raises(ModelMismatchError, match="has others"):
        check_weights(artifact, rank, "rank", int, widths)
    check_weights(artifact, rank, "rank", int, widths, split=tuple(states))
    rank.model.norm.weight.data.neg_()
    with pytest.raises(ModelMismatchError, match="has others"):
        check_weights(artifact, rank, "rank", int, widths, split=tuple(states))
