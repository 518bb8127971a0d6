"""One step of the engine, planned once for all layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from oscarkv.codec.layout import PAGE_QUANTUM
from oscarkv.integrations.vllm.metadata import HistoryMetadata
from oscarkv.integrations.vllm.settings import Settings
from oscarkv.kernels import LayerCache, get_backend


class Step:
    """Two backends, since a batch may hold decodes and chunks of prompts, and a backend holds one
    plan."""

    def __init__(self, settings: Settings, device: torch.device, sequences: int) -> None:
        self.strict = settings.strict
        self.decoding = get_backend(settings.backend, device)
        self.decoding.reserve(sequences)  # graphs of fewer are captured as well
        self.prefilling = get_backend(settings.backend, device)
        self._planned: HistoryMetadata | None = None

    def plan(self, step: HistoryMetadata, windows: Tensor, layer: LayerCache) -> None:
        """Take a step's tables, unless another layer did."""
        if self._planned is step:
            return
        self._planned = step
        history = step.table
        if history.device.type == "cpu":
            # The torch backend multiplies what it masks: keep it off blocks of other requests,
            # which rows of vLLM's tables still name beyond a sequence's end.
            history = _within(history, step.seq_lens, layer.layout.page_size)
            windows = _within(windows, step.seq_lens, PAGE_QUANTUM)
        n, starts = step.decodes, step.query_start_loc
        if n:
            self.decoding.plan(
                step.seq_lens[:n],
                starts[: n + 1],
                history[:n],
                windows[:n],
                self.strict,
                step.max_decode_len,
            )
        if step.tokens > step.decode_tokens:
            self.prefilling.plan(
                step.seq_lens[n:],
                starts[n:] - step.decode_tokens,
                history[n:],
                windows[n:],
                self.strict,
                step.max_query_len,
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, out: Tensor) -> None:
        step = self._planned
        assert step is not None
        n, end = step.decode_tokens, step.tokens
        if n:
            self.decoding.decode(q[:n], layer, out[:n])
        if end > n:
            self.prefilling.prefill(q[n:end], k[n:end], v[n:end], layer, out[n:end])


def _within(table: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Entries that hold one of a sequence's tokens; 0 for the others."""
    first = torch.arange(table.shape[1], device=table.device) * size
    return torch.where(first < lengths[:, None], table, 0)


class Steps:
    """A Step for every group of layers: beside layers that keep vLLM's cache, vLLM splits ours
    into groups of equal size with a table each."""

    def __init__(self, settings: Settings, device: torch.device, sequences: int) -> None:
        self._make = partial(Step, settings, device, sequences)
        self._groups: dict[str, Step] = {}
        self.writing = get_backend(settings.backend, device)

    def of_group(self, name: str) -> Step:
        if name not in self._groups:
            self._groups[name] = self._make()
        return self._groups[name]


_steps: dict[int, tuple[Any, Steps]] = {}


def steps_of(config: Any, settings: Settings, device: torch.device) -> Steps:
    """The engine's Steps. Engines in one process have a VllmConfig each."""
    found = _steps.get(id(config))
    if found is None or found[0] is not config:
        _steps.clear()  # those of engines that are gone
        sequences = config.scheduler_config.max_num_seqs
        found = _steps[id(config)] = (config, Steps(settings, device, sequences))
    return found[1]
