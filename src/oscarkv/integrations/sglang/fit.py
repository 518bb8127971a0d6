"""What `oscarkv sglang check` knows of SGLang. Imports no SGLang."""

from __future__ import annotations

from oscarkv.integrations.serving.fit import Engine
from oscarkv.integrations.sglang.capacity import Capacity
from oscarkv.integrations.sglang.plugin import check_version, engine_version

SGLANG = Engine(
    name="SGLang",
    command="sglang",
    length_option="--context-length",
    version=lambda: engine_version(),
    check_version=check_version,
    capacity=Capacity,
    mixes_caches=False,
)
