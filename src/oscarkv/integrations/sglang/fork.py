"""What users of the OSCAR authors' SGLang fork have in their scripts, and what to say instead."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from oscarkv.errors import OscarError

_IMPORT = "oscarkv zoo import K.pt V.pt --model MODEL -o FILE, then --oscarkv-artifact FILE"
_GROUP = "oscar_fork_group_size"
_RECIPE = "the artifact's recipe says it"
#: Variable -> the new option; {} stands for its value.
VARIABLES = {
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": "--attention-backend oscarkv",
    "SGLANG_MIXED_KV_PREFIX_TOKENS": "--oscarkv-sink {}",
    "SGLANG_MIXED_KV_RECENT_TOKENS": "--oscarkv-recent {}",
    "SGLANG_MIXED_KV_HP_DTYPE": "windows have the model's dtype",
    "SGLANG_MIXED_KV_SCALE_DTYPE": _RECIPE,
    "SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS": "windows share the pool of the history",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": "kernels choose their splits",
    "SGLANG_OSCAR_K_ROTATION_PATH": _IMPORT,
    "SGLANG_OSCAR_V_ROTATION_PATH": _IMPORT,
    "SGLANG_OSCAR_K_CLIP_RATIO": f"{_RECIPE}: oscarkv zoo import --recipe paper has 0.96",
    "SGLANG_OSCAR_V_CLIP_RATIO": f"{_RECIPE}: oscarkv zoo import --recipe paper has 0.92",
    "SGLANG_OSCAR_ABSORB_V_ROTATION": "weights are left alone, and the rotation is fused",
    "SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT": "always fused",
    "SGLANG_LLOYD_MAX": f"{_RECIPE}: oscarkv calibrate fits rows by least squares",
    "OSCAR_TRITON_PER_RANK_BASE": "nothing",
}
DTYPE, GROUP_SIZE = "int2", "--kv-cache-quant-group-size"
#: The same for its command line.
ARGUMENTS = {
    f"--kv-cache-dtype {DTYPE}": "--attention-backend oscarkv --oscarkv-artifact FILE",
    GROUP_SIZE: _RECIPE,
}


def advice(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A line for every variable of the fork that is set."""
    return [
        f"{name} is the OSCAR fork's and does nothing here; instead: {new.format(value)}"
        for name, new in VARIABLES.items()
        if (value := environment.get(name))
    ]


def recognise(parser: argparse.ArgumentParser) -> None:
    """Let SGLang's parser take the fork's arguments, so that they can be answered."""
    parser.add_argument(GROUP_SIZE, dest=_GROUP, default=None, help=argparse.SUPPRESS)
    dtype = parser._option_string_actions["--kv-cache-dtype"]
    if dtype.choices is not None:
        dtype.choices = [*dtype.choices, DTYPE]


def refuse(arguments: argparse.Namespace) -> None:
    given = {
        f"--kv-cache-dtype {DTYPE}": arguments.kv_cache_dtype == DTYPE,
        GROUP_SIZE: getattr(arguments, _GROUP) is not None,
    }
    for argument, present in given.items():
        if present:
            raise OscarError(f"{argument} is the OSCAR fork's; instead: {ARGUMENTS[argument]}")
