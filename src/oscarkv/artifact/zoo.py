"""RotationZoo `.pt` files, the public format for OSCAR's rotations, in and out.

    {"format_version": 1 or 2, "objective": str, "source_grouping": "layer",
     "layers": {id: {"layer_id": id, "rotation": fp32, "eigenvalues": fp32}}}

Version 1 has one rotation [d, d] a layer, version 2 one a KV head [H, d, d]; keys and values are
two files. They are pickles, so they are only ever read with `weights_only=True`, which builds
tensors and plain containers and runs nothing.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscarkv.artifact.artifact import Artifact, LayerTransforms, ModelIdentity
from oscarkv.artifact.files import library_version, write_atomically
from oscarkv.errors import ArtifactError, OscarError, RecipeError
from oscarkv.recipe import Recipe

KEY_FILE = "k_rotation_qqt_r_h_pbr.pt"
VALUE_FILE = "v_rotation_sst_r_h_pbr.pt"
PER_HEAD_OBJECTIVE = "cov_eig_hadamard_perhead"
#: Largest entry of R R^T - I that passes for fp32 rounding.
EXACT_TOLERANCE = 1e-5
#: The same for rotations that were rounded to bf16; what lies between is made orthogonal again.
ROUNDED_TOLERANCE = 1e-2


def import_zoo(
    key_path: str | Path,
    value_path: str | Path,
    model: ModelIdentity,
    *,
    layers: Sequence[int] | None = None,
    recipe: Recipe | None = None,
) -> Artifact:
    """An artifact from two RotationZoo files.

    `layers` are those to quantise (all of the model's, unless given); the files must have each of
    them. `recipe` says how rows are encoded, which the files do not: by default the published
    recipe, `paper` for version 1 and `paper-per-head` for version 2.
    """
    wanted = list(range(model.layers)) if layers is None else list(layers)
    keys = _read(Path(key_path), model, wanted, other="sst")
    values = _read(Path(value_path), model, wanted, other="qqt")
    per_head = any(rotation.dim() == 3 for rotation in (*keys.values(), *values.values()))
    if recipe is None:
        recipe = Recipe.named("paper-per-head" if per_head else "paper")
    if recipe.center or recipe.metric_rounding or recipe.parameters != "fp16":
        raise RecipeError(
            f"recipe {recipe.name!r} needs statistics that rotation files do not have; use paper, "
            "or calibrate the model"
        )
    transforms = {layer: _transforms(keys[layer], values[layer], model) for layer in wanted}
    source = {"source": "RotationZoo", "tokens": 0}
    return Artifact(model, recipe, transforms, source, library_version())


def export_zoo(artifact: Artifact, directory: str | Path) -> tuple[Path, Path]:
    """Write an artifact's rotations as two RotationZoo files; returns their paths.

    Version 1 where all heads of a layer share their rotations, else version 2. Artifacts do not
    keep the eigenvalues of the target, so the files have zeros for them; nothing reads them.
    """
    for index, layer in sorted(artifact.layers.items()):
        _require_rotations(index, layer, artifact.recipe)
    sides = {
        "key": {index: layer.key for index, layer in artifact.layers.items()},
        "value": {index: layer.value for index, layer in artifact.layers.items()},
    }
    shared = all(
        bool((rotation == rotation[:1]).all())
        for rotations in sides.values()
        for rotation in rotations.values()
    )
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OscarError(f"cannot create {directory}: {error.strerror or error}") from None
    paths = (directory / KEY_FILE, directory / VALUE_FILE)
    # Both are made before either is written.
    contents = [_file(sides[side], side, shared, artifact.recipe) for side in ("key", "value")]
    for path, content in zip(paths, contents, strict=True):
        write_atomically(path, partial(_write, content))
    return paths


# -- writing -------------------------------------------------------------------------------------


def _write(content: bytes, part: Path) -> None:
    part.write_bytes(content)


def _file(rotations: dict[int, Tensor], side: str, shared: bool, recipe: Recipe) -> bytes:
    published = recipe.key_transform == "rotation" and recipe.composition == "UHP"
    objective = {"key": "qqt_r_h_pbr", "value": "sst_r_h_pbr"}[side] if published else recipe.name
    layers = {}
    for index, rotation in sorted(rotations.items()):
        stored = (rotation[0] if shared else rotation).detach().cpu().clone()
        eigenvalues = torch.zeros(stored.shape[:-1])
        layers[index] = {"layer_id": index, "rotation": stored, "eigenvalues": eigenvalues}
    buffer = io.BytesIO()
    content = {
        "format_version": 1 if shared else 2,
        "objective": objective if shared else PER_HEAD_OBJECTIVE,
        "source_grouping": "layer",
        "layers": layers,
    }
    torch.save(content, buffer)
    return buffer.getvalue()


def _require_rotations(index: int, layer: LayerTransforms, recipe: Recipe) -> None:
    reason = ""
    if bool(layer.key_mean.any()) or bool(layer.value_mean.any()):
        reason = "it subtracts means, which rotation files cannot hold"
    for name, matrix in (("key", layer.key), ("value", layer.value)):
        error = _orthogonality_error(matrix.double())
        if error > EXACT_TOLERANCE:
            reason = f"its {name} transform is not a rotation (R R^T differs from I by {error:.2g})"
    if reason:
        raise ArtifactError(
            f"cannot export recipe {recipe.name!r} to RotationZoo files: in layer {index} "
            f"{reason}; calibrate with --recipe paper for files that other software can use"
        )


# -- reading -------------------------------------------------------------------------------------


def _transforms(key: Tensor, value: Tensor, model: ModelIdentity) -> LayerTransforms:
    """A layer of pure rotations, each its own inverse transposed; all else is unknown or unused."""
    heads, dim = model.kv_heads, model.head_dim
    key, value = (r.float().expand(heads, dim, dim).contiguous() for r in (key, value))
    return LayerTransforms(
        key=key,
        query=key.clone(),
        key_mean=torch.zeros(heads, dim),
        value=value,
        value_inverse=value.mT.contiguous(),
        value_mean=torch.zeros(heads, dim),
        exponents=torch.zeros(2, heads, dtype=torch.int32),  # 16-bit parameters have none
        spectrum=torch.zeros(heads, dim),
        errors=torch.full((2, heads), torch.nan),
        fallback=torch.zeros(heads, dtype=torch.int32),
    )


def _read(path: Path, model: ModelIdentity, wanted: list[int], other: str) -> dict[int, Tensor]:
    """fp64 rotations by layer; `other` starts the objective of the file's counterpart."""
    content = _load(path)
    version = content.get("format_version")
    if version not in (1, 2):
        raise ArtifactError(f"{path}: RotationZoo format {version!r}, this reads 1 and 2")
    if str(content.get("objective", "")).startswith(other):
        raise ArtifactError(
            f"{path} has objective {content['objective']!r}: the key and value files are swapped; "
            "give the key file first"
        )
    layers = content.get("layers")
    if not isinstance(layers, dict) or not all(str(index).isdigit() for index in layers):
        raise ArtifactError(f"{path}: 'layers' is not a table of layer numbers")
    found = {int(index): entry for index, entry in layers.items()}
    if missing := sorted(set(wanted) - set(found)):
        raise ArtifactError(
            f"{path} has no rotation for layer {', '.join(map(str, missing))} of {model.name} "
            f"({model.layers} layers); it belongs to another model, or those layers are left out "
            "with --skip-layers"
        )
    if outside := sorted(set(found) - set(range(model.layers))):
        raise ArtifactError(
            f"{path} has layer {outside[-1]}, but {model.name} has {model.layers} layers; it "
            "belongs to another model"
        )
    return {index: _rotation(found[index], f"{path}: layer {index}", model) for index in wanted}


def _load(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        with warnings.catch_warnings(action="ignore"):  # about files that are refused anyway
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ArtifactError(
            f"{path} holds more than tensors and plain containers, and reading it would run code "
            "from the file; it was not read. Rotation files never need that: get it from a source "
            "you trust, saved with torch.save from plain tensors"
        ) from None
    except Exception as error:  # torch raises a dozen kinds for damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArtifactError(f"{path} is not a readable PyTorch file ({reason})") from None
    if not isinstance(content, dict):
        raise ArtifactError(
            f"{path} is not a RotationZoo file: it holds a {type(content).__name__}"
        )
    return content


def _rotation(entry: Any, where: str, model: ModelIdentity) -> Tensor:
    rotation = entry.get("rotation") if isinstance(entry, dict) else None
    if not isinstance(rotation, Tensor) or rotation.layout != torch.strided:
        raise ArtifactError(f"{where} has no rotation")
    heads, dim = model.kv_heads, model.head_dim
    if tuple(rotation.shape) not in ((dim, dim), (heads, dim, dim)):
        raise ArtifactError(
            f"{where}: rotation has shape {list(rotation.shape)}, {model.name} needs "
            f"{[dim, dim]} or {[heads, dim, dim]}"
        )
    if not rotation.is_floating_point():
        raise ArtifactError(f"{where}: rotation is {rotation.dtype}, not floating point")
    matrix = rotation.double()
    error = _orthogonality_error(matrix)
    if not error <= ROUNDED_TOLERANCE:  # also NaN
        raise ArtifactError(
            f"{where}: not a rotation (R R^T differs from I by {error:.2g}, at most "
            f"{ROUNDED_TOLERANCE:g} is rounding)"
        )
    if error > EXACT_TOLERANCE:
        # Rounded to bf16: take the nearest orthogonal matrix, the polar factor.
        left, _, right = torch.linalg.svd(matrix)
        matrix = left @ right
    return matrix


def _orthogonality_error(matrix: Tensor) -> float:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return float((matrix @ matrix.mT - eye).abs().max())
