"""Models of 16-bit weights that compute in fp32 for a while."""

import pytest
import torch
from integrations import tiny

from oscarkv.integrations.transformers.geometry import decoder_layers
from oscarkv.integrations.transformers.precision import computing_in_float32
from oscarkv.integrations.transformers.predictions import log_probabilities

IDS = tiny.tokens(1, 40)


def predicted(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return log_probabilities(model, model.base_model(input_ids=IDS).last_hidden_state[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_predictions_are_those_of_the_same_weights_in_float32(
    name: str, dtype: torch.dtype
) -> None:
    model = tiny.model(name).to(dtype)
    before = predicted(model)
    with computing_in_float32(model, decoder_layers(model)):
        found = predicted(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(predicted(model), before)
    expected = predicted(model.float())
    # Gemma scales embeddings by a number that is rounded to their type.
    assert (found - expected).abs().max() <= (0.02 if name == "gemma3" else 1e-4)
    assert (before - expected).abs().max() > 3 * (found - expected).abs().max()


def test_an_error_leaves_the_weights_as_they_were() -> None:
    model = tiny.model().to(torch.bfloat16)
    layers = decoder_layers(model)
    layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), computing_in_float32(model, layers):
        predicted(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_models_in_float32_are_left_alone() -> None:
    model = tiny.model()
    with computing_in_float32(model, decoder_layers(model)):
        assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))
