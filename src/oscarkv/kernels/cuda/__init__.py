"""The fastest backend: CUDA C++, compiled at first use (sm_80 and newer, tuned on sm_90).

`*.cu` are the kernels, the Python file of the same name launches them, `compile.py` and `launch.py`
are all the machinery there is. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from importlib.util import find_spec

SMALLEST_CAPABILITY = (8, 0)


def unusable_reason() -> str | None:
    """Why this backend cannot run here, or None."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no NVIDIA GPU is visible to torch"
    for package in ("cuda.core", "cuda.bindings"):
        if not _found(package):
            return f'{package} is not installed: pip install "oscarkv[cuda]"'
    capability = torch.cuda.get_device_capability()
    if capability < SMALLEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def cache_folder() -> str:
    """Where compiled kernels are kept."""
    from oscarkv.kernels.cuda import compile

    return str(compile.cache_folder())
