"""The workers' end: one sequence through the model twice, in no cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from oscarkv.errors import OscarError
from oscarkv.integrations.vllm.canary.attention import Exact, Packed, attending
from oscarkv.integrations.vllm.settings import settings_of

#: Positions that are scored at most: the last ones.
SCORED = 512
#: Positions whose logits are held at a time.
LOGITS_BLOCK = 64


class CanaryWorker:
    """Mixed into vLLM's workers (`worker_extension_cls`): a method that `collective_rpc` calls on
    every rank between two steps."""

    vllm_config: Any
    device: Any

    def oscarkv_rescore(self, tokens: list[int]) -> dict[str, Any]:
        """KL, agreement and drift of one sequence; an error is an answer too: one that is raised
        on a rank would leave other ranks' answers in vLLM's queues."""
        started = time.perf_counter()
        try:
            scores = rescore(self.vllm_config, self.get_model(), self.device, tokens)  # type: ignore[attr-defined]
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return scores | {"tokens": len(tokens), "seconds": time.perf_counter() - started}


@torch.inference_mode()
def rescore(config: Any, model: Any, device: Any, tokens: list[int]) -> dict[str, float | None]:
    settings = settings_of(config)
    if settings is None:
        raise OscarError("oscarkv is switched off")
    dtype, head_dim = config.model_config.dtype, config.model_config.get_head_size()
    exact = Exact(settings)
    packed = Packed(settings, len(tokens), head_dim, dtype, device)
    ids = torch.tensor(tokens, dtype=torch.int32, device=device)

    def hidden_states(attention: Exact | Packed) -> Tensor:
        # Neither compiled code nor graphs: they are made for steps of the engine.
        with (
            attending(config, attention),
            set_forward_context(None, config, num_tokens=len(tokens), skip_compiled=True),
        ):
            hidden = model(input_ids=ids, positions=torch.arange(len(tokens), device=device))
        return hidden[0] if isinstance(hidden, tuple) else hidden  # others are for drafts

    first = first_scored(len(tokens), settings.recipe.sink + settings.recipe.recent)
    reference, served = (hidden_states(attention)[first:] for attention in (exact, packed))
    return {**compare(model, reference, served), "drift": exact.drift()}


def first_scored(length: int, windows: int) -> int:
    """The first position that is scored: queries before `windows` read nothing packed."""
    return max(windows if windows < length else 0, length - SCORED)


def compare(model: Any, reference: Tensor, served: Tensor) -> dict[str, float | None]:
    """Means over positions. None on ranks that are given no logits."""
    divergence, agrees = [], []
    for rows in torch.arange(reference.shape[0], device=reference.device).split(LOGITS_BLOCK):
        logits = [model.compute_logits(hidden[rows]) for hidden in (reference, served)]
        if logits[0] is None or logits[1] is None:
            continue
        p, q = (torch.log_softmax(x.float(), -1) for x in logits)
        divergence.append((p.exp() * (p - q)).sum(-1))
        agrees.append((p.argmax(-1) == q.argmax(-1)).float())
    if not divergence:
        return {"kl": None, "agreement": None}
    return {"kl": float(torch.cat(divergence).mean()), "agreement": float(torch.cat(agrees).mean())}
