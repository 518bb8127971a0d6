"""Requests through `generate()`, in padded batches, on a stock or a packed cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from oscarkv.artifact import Artifact
from oscarkv.evaluation.tasks.requests import Answer, Request, Sampling, Take
from oscarkv.integrations.transformers.cache import OscarCache


@dataclass
class TransformersEngine:
    """Without an artifact, on Transformers' own cache."""

    model: Any
    tokenizer: Any
    artifact: Artifact | None
    batch: int = 8
    backend: str = "auto"
    strict: bool = False

    def answer(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None:
        def like(request: Request) -> tuple[Any, ...]:
            """What requests must agree in to be one batch. Each problem has its own seed."""
            return request.stop, request.max_new_tokens, 0 if sampling.greedy else request.seed

        # Prompts of like length together, so that little is padding.
        order = sorted(requests, key=lambda r: (*like(r), len(r.tokens)))
        for _, group in groupby(order, like):
            alike = list(group)
            for start in range(0, len(alike), self.batch):
                self._batch(alike[start : start + self.batch], sampling, take)

    def _batch(self, requests: Sequence[Request], sampling: Sampling, take: Take) -> None:
        ids, mask = self._padded([request.tokens for request in requests])
        first = requests[0]
        options: dict[str, Any] = {"do_sample": False, "temperature": None}
        options |= {"top_p": None, "top_k": None}
        if not sampling.greedy:
            torch.manual_seed(first.seed)
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        if first.stop:
            options |= {"stop_strings": list(first.stop), "tokenizer": self.tokenizer}
        with torch.no_grad():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=self._cache(),
                max_new_tokens=first.max_new_tokens,
                pad_token_id=self._pad,
                **options,
            )
        ends = self._ends()
        for request, row in zip(requests, output[:, ids.shape[1] :].tolist(), strict=True):
            stop = next((i for i, token in enumerate(row) if token in ends), None)
            made = row if stop is None else row[:stop]
            while made and made[-1] == self._pad:  # others in the batch went on
                made.pop()
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            whole = stop is None and len(made) >= request.max_new_tokens
            finish = "length" if whole else "stop"
            take(Answer(request.key, text, len(made), finish))

    def _cache(self) -> Cache:
        if self.artifact is None:
            return DynamicCache(config=self.model.config)
        return OscarCache(self.model, self.artifact, backend=self.backend, strict=self.strict)

    @property
    def _pad(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def _ends(self) -> set[int]:
        """What ends a text: the tokenizer's token, and those the model was saved with."""
        configured = self.model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return {int(t) for t in [*listed, self.tokenizer.eos_token_id] if t is not None}

    def _padded(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self._pad)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, longest - len(row) :] = torch.tensor(row)
            mask[index, longest - len(row) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)
