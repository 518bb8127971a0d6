"""What a model predicts, from its last hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    """fp32 log probabilities [..., vocabulary], capped and scaled as the model does."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits, -1)
