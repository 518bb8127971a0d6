"""Layers whose cache is a state of the whole sequence: Mamba, linear attention, short convolutions.

They keep vLLM's own cache. All of vLLM's blocks have as many bytes a layer, and a state is mostly
larger than a page of ours: where it is, a block of ours holds several pages, and a state is padded
to whole ones.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.math_utils import round_up

from oscarkv.integrations.vllm.windows import WindowLayer


def align_states(config: Any) -> None:
    """Pad states to whole pages, in a worker that has loaded its model; `config`: VllmConfig. vLLM
    then puts as many pages into our blocks (`unify_kv_cache_spec_page_size`).

    Itself vLLM takes a page of ours for a block of one token, and pads to its default block's
    worth of those.
    """
    known = config.compilation_config.static_forward_context.values()
    pages = [layer.spec.page_size_bytes for layer in known if isinstance(layer, WindowLayer)]
    specs = [layer.get_kv_cache_spec(config) for layer in known if isinstance(layer, MambaBase)]
    sizes = [spec.real_page_size_bytes for spec in specs if spec is not None]
    if pages and sizes:
        config.cache_config.mamba_page_size_padded = round_up(max(sizes), max(pages))
