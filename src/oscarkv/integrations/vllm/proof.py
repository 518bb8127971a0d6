"""Whether an engine really attends with oscarkv: for those who measure it."""

from __future__ import annotations

from typing import Any


def implementations(config: Any) -> list[str]:
    """The classes that attend; none where layers live in other processes (several ranks).
    `config`: VllmConfig."""
    layers = config.compilation_config.static_forward_context.values()
    found = {type(layer.impl) for layer in layers if hasattr(layer, "impl")}
    return sorted(f"{kind.__module__}.{kind.__name__}" for kind in found)


def require_plugin(attention: list[str]) -> None:
    """Stock attention measured under our name would be the worst of figures."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    if not (custom.is_overridden() and custom.get_path().startswith("oscarkv.")):
        raise RuntimeError("vLLM did not load oscarkv's plugin; is oscarkv installed with pip?")
    if attention and not any(name.startswith("oscarkv.") for name in attention):
        raise RuntimeError(f"no layer attends with oscarkv: {', '.join(attention)}")
