"""Stands in for torchvision, which SGLang imports for images and a CPU build of torch cannot load.

Every name in it exists and nothing in it works.
"""

import importlib.machinery
import sys
import types

__version__ = "0.0.0"
__path__: list[str] = []


class _Member(type):
    """So that members of a class, such as InterpolationMode.NEAREST, exist too."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Names(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(name, (), {})


def _module(name: str) -> types.ModuleType:
    made = _Names(name)
    made.__path__ = []  # type: ignore[attr-defined]
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made
    return made


io = _module("torchvision.io")
ops = _module("torchvision.ops")
ops.boxes = _module("torchvision.ops.boxes")  # type: ignore[attr-defined]
utils = _module("torchvision.utils")
transforms = _module("torchvision.transforms")
transforms.functional = _module("torchvision.transforms.functional")  # type: ignore[attr-defined]
transforms.v2 = _module("torchvision.transforms.v2")  # type: ignore[attr-defined]
transforms.v2.functional = _module("torchvision.transforms.v2.functional")
