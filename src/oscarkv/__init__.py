"""oscarkv: 2-bit KV caches for LLM serving.

    import oscarkv

    model, tokenizer = oscarkv.load_model("smollm2")
    artifact = oscarkv.calibrate(model, tokenizer, [open("book.txt").read()])
    oscarkv.save_artifact(artifact, "smollm2.safetensors")

    cache = oscarkv.OscarCache(model, artifact)
    inputs = tokenizer("The sea was", return_tensors="pt")
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    print(tokenizer.decode(output[0]), cache.nbytes())

Names are imported when they are first used: `import oscarkv` itself does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact, load_artifact, save_artifact
    from oscarkv.integrations.transformers.attach import attach
    from oscarkv.integrations.transformers.cache import OscarCache
    from oscarkv.integrations.transformers.calibrate import calibrate
    from oscarkv.integrations.transformers.models import load_model
    from oscarkv.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Artifact",
    "OscarCache",
    "Recipe",
    "attach",
    "calibrate",
    "load_artifact",
    "load_model",
    "save_artifact",
]

_HOMES = {
    "Artifact": "oscarkv.artifact",
    "OscarCache": "oscarkv.integrations.transformers.cache",
    "Recipe": "oscarkv.recipe",
    "attach": "oscarkv.integrations.transformers.attach",
    "calibrate": "oscarkv.integrations.transformers.calibrate",
    "load_artifact": "oscarkv.artifact",
    "load_model": "oscarkv.integrations.transformers.models",
    "save_artifact": "oscarkv.artifact",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oscarkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
