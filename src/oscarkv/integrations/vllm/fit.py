"""What `oscarkv vllm check` knows of vLLM. Imports no vLLM."""

from __future__ import annotations

from oscarkv.integrations.serving.fit import Engine
from oscarkv.integrations.vllm.capacity import Capacity
from oscarkv.integrations.vllm.plugin import check_version, engine_version

VLLM = Engine(
    name="vLLM",
    command="vllm",
    length_option="--max-model-len",
    version=lambda: engine_version(),
    check_version=check_version,
    capacity=Capacity,
    mixes_caches=True,
)
