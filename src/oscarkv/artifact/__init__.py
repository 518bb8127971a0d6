"""The calibrated transforms of a model, in one safetensors file that is checked on load.

Imports `recipe`, `codec` and `errors`.
"""

from oscarkv.artifact.artifact import Artifact, LayerTransforms, ModelIdentity, reader_of
from oscarkv.artifact.files import load_artifact, save_artifact

__all__ = [
    "Artifact",
    "LayerTransforms",
    "ModelIdentity",
    "load_artifact",
    "reader_of",
    "save_artifact",
]
