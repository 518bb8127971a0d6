"""Reading and writing artifact files. Pickles are never loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oscarkv.artifact.artifact import (
    FORMAT_VERSION,
    MIXED_FORMAT_VERSION,
    REFINED_FORMAT_VERSION,
    SPLIT_FORMAT_VERSION,
    WIDE_FORMAT_VERSION,
    Artifact,
    LayerTransforms,
    ModelIdentity,
)
from oscarkv.errors import ArtifactError, OscarError
from oscarkv.recipe import REFINED_BITS, Recipe

#: The one metadata key of an artifact file; its value is a JSON object.
HEADER_KEY = "oscarkv"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary file beside `path`, then move it there in one step."""
    path = Path(path)
    # Not mkstemp: its files are for their owner alone, and an artifact is to be shared.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        write(part)
        os.replace(part, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OscarError(f"cannot write {path}: {reason}; nothing was changed there") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def save_artifact(artifact: Artifact, path: str | Path) -> None:
    """Write an artifact; the file appears whole or not at all."""
    tensors = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in artifact.layers.items()
        for name, tensor in layer.tensors().items()
    }
    header = {
        "format_version": _version(artifact),
        "library_version": library_version(),
        "model": dataclasses.asdict(artifact.model),
        "recipe": dataclasses.asdict(artifact.recipe),
        "calibration": artifact.calibration,
        "quantised_layers": sorted(artifact.layers),
    }
    if artifact.mixed:
        header["layer_bits"] = {str(i): list(b) for i, b in sorted(artifact.layer_bits.items())}
    data = save(tensors, metadata={HEADER_KEY: json.dumps(header, sort_keys=True)})
    write_atomically(Path(path), lambda part: _write_bytes(part, data))


def _version(artifact: Artifact) -> int:
    if artifact.refines_wide_keys:
        return WIDE_FORMAT_VERSION
    if artifact.recipe.split_scales:
        return SPLIT_FORMAT_VERSION
    if artifact.recipe.refine_keys:
        return REFINED_FORMAT_VERSION
    return MIXED_FORMAT_VERSION if artifact.mixed else FORMAT_VERSION


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def load_artifact(path: str | Path) -> Artifact:
    """Read and check an artifact file."""
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path} does not exist; make one with: oscarkv calibrate")
    if path.is_dir():
        raise ArtifactError(f"{path} is a directory, not an artifact file")
    try:
        _refuse_pickles(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a readable safetensors file ({error}); it may be cut off or damaged: "
            "copy it again, or calibrate anew"
        ) from None
    try:
        return _parse(metadata, tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged header: {error!r}") from None
    except OscarError as error:
        raise ArtifactError(f"{path}: {error}") from None


def _parse(metadata: dict[str, str], tensors: dict[str, Any]) -> Artifact:
    if HEADER_KEY not in metadata:
        raise ArtifactError("a safetensors file, but not an oscarkv artifact (no header)")
    header = json.loads(metadata[HEADER_KEY])
    found = header["format_version"]
    if found not in range(FORMAT_VERSION, WIDE_FORMAT_VERSION + 1):
        raise ArtifactError(
            f"artifact format {found}, this oscarkv ({library_version()}) reads formats "
            f"{FORMAT_VERSION} to {WIDE_FORMAT_VERSION}; install the version that wrote it "
            f"({header.get('library_version', 'unknown')}) or calibrate anew"
        )
    knobs = {"refine_keys": False} if found < REFINED_FORMAT_VERSION else {}
    by_layer: dict[int, dict[str, Any]] = {index: {} for index in header["quantised_layers"]}
    fields = {item.name for item in dataclasses.fields(LayerTransforms)}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        if prefix != "layers" or not index.isdigit() or part not in fields:
            raise ArtifactError(f"unexpected tensor {name!r}")
        if int(index) not in by_layer:
            raise ArtifactError(f"tensor {name!r} of a layer the header does not list")
        by_layer[int(index)][part] = tensor
    layers = {}
    for layer, parts in by_layer.items():
        missing = sorted(fields - {"metric"} - set(parts))
        if missing:
            raise ArtifactError(f"layer {layer}: missing {', '.join(missing)}")
        layers[layer] = LayerTransforms(**parts)
    recipe = Recipe().replace(**knobs | header["recipe"])
    bits = {int(i): (int(k), int(v)) for i, (k, v) in header.get("layer_bits", {}).items()}
    if found < WIDE_FORMAT_VERSION and recipe.refine_keys:
        key_bits = {recipe.key_bits, *(keys for keys, _ in bits.values())}
        if key_bits & set(REFINED_BITS) - {2}:
            raise ArtifactError(
                f"artifact format {found} has keys of 3 bits as they were before they could be "
                "refined; calibrate or tune anew"
            )
    identity = ModelIdentity(**header["model"])
    return Artifact(
        identity, recipe, layers, header["calibration"], header["library_version"], bits
    )


def _refuse_pickles(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors file begins with the length of its header, any eight bytes, and a brace.
    if start[8:] != b"{" and (start[:2] == b"PK" or start[:1] == b"\x80"):
        raise ArtifactError(
            f"{path} is a pickled PyTorch file, not an artifact; RotationZoo files are brought in "
            "with: oscarkv zoo import"
        )


def library_version() -> str:
    try:
        return version("oscarkv")
    except PackageNotFoundError:
        return "unknown"
