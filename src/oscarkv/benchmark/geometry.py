"""Models that have a shape and no weights: enough to measure an engine's speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oscarkv.artifact import Artifact, LayerTransforms, ModelIdentity, reader_of, save_artifact
from oscarkv.calibration.budget import SIDES, affordable, with_more
from oscarkv.errors import OscarError
from oscarkv.recipe import Recipe

ARCHITECTURE = "Qwen3ForCausalLM"
#: Longer than the models' own context: positions cost nothing, and 100K is to be measured too.
CONTEXT = 131072

_QWEN3_8B: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3_8B
    | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": _QWEN3_8B,
    "qwen3-32b": _QWEN3_8B
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "tiny": _QWEN3_8B
    | {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
    },
}


def geometry(name: str) -> dict[str, Any]:
    if name not in GEOMETRIES:
        raise OscarError(f"unknown geometry {name!r}; known: {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]


def make_model(name: str, folder: Path, recipe: Recipe) -> tuple[Path, Path]:
    """A model directory without weights, and an artifact that fits it."""
    config = geometry(name)
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    artifact = folder / f"{name}.safetensors"
    save_artifact(random_artifact(name, config, recipe), artifact)
    return model, artifact


def random_artifact(name: str, config: dict[str, Any], recipe: Recipe, seed: int = 0) -> Artifact:
    """Random rotations: they cost what fitted transforms cost, and mean nothing."""
    rng = torch.Generator().manual_seed(seed)
    heads, dim = config["num_key_value_heads"], config["head_dim"]

    def rotation() -> torch.Tensor:
        square = torch.randn(heads, dim, dim, generator=rng, dtype=torch.float64)
        return torch.linalg.qr(square).Q.float()

    def layer() -> LayerTransforms:
        key, value = rotation(), rotation()
        return LayerTransforms(
            key=key,
            query=reader_of(key, recipe),
            key_mean=torch.zeros(heads, dim),
            value=value,
            value_inverse=value.mT.contiguous(),
            value_mean=torch.zeros(heads, dim),
            exponents=torch.full((2, heads), -10, dtype=torch.int32),
            spectrum=torch.ones(heads, dim),
            errors=torch.full((2, heads), torch.nan),
            fallback=torch.zeros(heads, dtype=torch.int32),
            metric=torch.eye(dim).repeat(heads, 1, 1) if recipe.metric_rounding else None,
        )

    layers = config["num_hidden_layers"]
    identity = ModelIdentity(
        name=f"{name} (random weights)",
        architecture=ARCHITECTURE,
        layers=layers,
        query_heads=config["num_attention_heads"],
        kv_heads=heads,
        head_dim=dim,
        context=config["max_position_embeddings"],
        rope="",
        fingerprint="",
    )
    made = Artifact(identity, recipe, {index: layer() for index in range(layers)})
    if recipe.budget is None:
        return made
    # As many parts with a bit more as the budget has room for: both sides of layers all over.
    count = max(0, affordable(recipe, dim, layers, recipe.budget))
    fuller = [index * layers // max(1, count // 2) for index in range(count // 2)]
    return with_more(made, [(index, side) for index in fuller for side in SIDES])
