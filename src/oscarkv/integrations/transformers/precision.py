"""A model that computes in fp32 with the 16-bit weights it has.

In 16 bits, changing anything anywhere changes how everything after it is rounded, which moves
predictions more than most layers' codes do: small effects are only seen in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HALF_TYPES = (torch.bfloat16, torch.float16)


@contextmanager
def computing_in_float32(model: Any, layers: Sequence[nn.Module]) -> Iterator[None]:
    """`layers`: those decoder layers that will run. Each has its weights in fp32 while it runs, so
    that little more memory is taken. Models that are in fp32 already, or have weights of other
    types (FP8, say), compute as they do.
    """
    types = {parameter.dtype for parameter in model.parameters()}
    if not types <= {*HALF_TYPES, torch.float32} or types == {torch.float32} or not layers:
        yield
        return
    embeddings = model.get_input_embeddings()
    inside = {inner for layer in layers for inner in layer.modules()}
    outside = {
        module
        for module in model.modules()
        if module not in inside
        and module is not embeddings
        and any(True for _ in module.parameters(recurse=False))
    }
    with ExitStack() as stack:
        handle = embeddings.register_forward_hook(lambda _module, _inputs, output: output.float())
        stack.callback(handle.remove)
        for module in (*layers, *outside):
            stack.enter_context(_in_float32_while_it_runs(module))
        yield


@contextmanager
def _in_float32_while_it_runs(module: nn.Module) -> Iterator[None]:
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def widen(_module: nn.Module, _inputs: Any) -> None:
        for parameter in module.parameters():
            if parameter.dtype in HALF_TYPES:
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        while kept:
            parameter, data = kept.pop()
            parameter.data = data

    before = module.register_forward_pre_hook(widen)
    after = module.register_forward_hook(restore, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        restore()
