"""The same prompt with a stock cache and with a packed one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from oscarkv.artifact import Artifact
from oscarkv.errors import OscarError
from oscarkv.integrations.transformers.cache import OscarCache

SERVING_BYTES = 2  # an exact element in bf16


@dataclass(frozen=True)
class Generation:
    """What came out, and what the cache held at the end."""

    tokens: list[int]
    text: str
    seconds: float
    cached: int  # tokens in the cache
    held: int  # bytes, as they are
    serving: int  # bytes if exact elements were bf16, as in serving (here they may be fp32)
    bits: float  # per cached element, in serving; slack and tables included


def encode(tokenizer: Any, prompt: str, chat: bool | None = None) -> Tensor:
    """Token ids [1, n] of a prompt. `chat` None: as a chat message where there is a template."""
    if not prompt.strip():
        raise OscarError("the prompt is empty")
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise OscarError("this model's tokenizer has no chat template; use --no-chat")
    if template and chat is not False:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] == 0:
        raise OscarError("the prompt has no tokens")
    return ids


def require_room(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    context = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    if context and prompt_tokens + new_tokens > context:
        raise OscarError(
            f"the prompt has {prompt_tokens} tokens and {new_tokens} new ones were asked for, "
            f"{prompt_tokens + new_tokens} in all; the model's context is {context}. Shorten the "
            "prompt or use fewer --max-new-tokens"
        )


def generate(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    artifact: Artifact | None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    streamer: Any = None,
    backend: str = "auto",
) -> Generation:
    """Continue a prompt; without an artifact, on Transformers' own cache."""
    require_room(model, ids.shape[1], max_new_tokens)
    cache: Cache
    if artifact is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = OscarCache(model, artifact, backend=backend)
    ids = ids.to(model.device)
    end = tokenizer.eos_token_id
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "top_p": None, "top_k": None}
    sampling["temperature"] = temperature if temperature > 0 else None
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=tokenizer.pad_token_id if end is None else end,
            streamer=streamer,
            **sampling,
        )
    seconds = time.perf_counter() - start
    tokens = output[0, ids.shape[1] :].tolist()
    held, serving, elements = _memory(cache)
    return Generation(
        tokens=tokens,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        seconds=seconds,
        cached=cache.get_seq_length(),
        held=held,
        serving=serving,
        bits=8 * serving / max(elements, 1),
    )


def _memory(cache: Cache) -> tuple[int, int, int]:
    """Bytes held, bytes with exact elements in bf16, and cached elements."""
    stock = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    ]
    elements = sum(tensor.numel() for tensor in stock)
    held, serving = sum(tensor.nbytes for tensor in stock), SERVING_BYTES * elements
    if isinstance(cache, OscarCache):
        pages = cache.pages.nbytes()
        held += pages
        serving += pages
        for store in cache.pages.layers:
            serving += store.window.numel() * (SERVING_BYTES - store.window.itemsize)
            elements += 2 * store.kv_heads * store.layout.head_dim * sum(cache.pages.lengths)
    return held, serving, elements


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two token lists part, or None where they are the same."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
