"""From names of recipes and methods to subjects: calibrates, fits, and keeps what it made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oscarkv.artifact import Artifact, load_artifact, save_artifact
from oscarkv.calibration.general import general_texts
from oscarkv.errors import ArtifactError, OscarError
from oscarkv.evaluation.fidelity import Progress
from oscarkv.evaluation.subjects import Packed, Simulated, Subject, simulate_method
from oscarkv.integrations.transformers.calibrate import DEFAULT_TOKENS, calibrate_many
from oscarkv.integrations.transformers.geometry import describe
from oscarkv.integrations.transformers.simulate import fit_simulation
from oscarkv.integrations.transformers.text import calibration_sequences, text_sha256
from oscarkv.methods import needs
from oscarkv.methods.simulation import Simulation
from oscarkv.recipe import Recipe

#: Simulated methods are fitted to this many tokens, in sequences of this length: their papers use
#: 16 to 83 sequences of 2,048, for statistics that settle far earlier.
SIMULATION_TOKENS, SIMULATION_LENGTH = 16384, 2048


def fit_artifacts(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    recipes: Mapping[str, Recipe],
    *,
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    general: bool = True,
    keep: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Artifact]:
    """Artifacts by name. With `keep`, those found there are read, and new ones are written."""
    identity = describe(model).identity
    found: dict[str, Artifact] = {}
    paths: dict[str, Path] = {}
    for name, recipe in recipes.items():
        seen = text_sha256([*texts, *(general_texts() if general else ())])
        asked = [recipe.to_json(), seen, tokens, length, identity.fingerprint]
        if keep is not None:
            digest = hashlib.sha256("\n".join(map(str, asked)).encode()).hexdigest()[:12]
            paths[name] = keep / f"{_slug(name)}-{digest}.safetensors"
            if paths[name].exists():
                found[name] = _kept(paths[name])
    missing = {name: recipe for name, recipe in recipes.items() if name not in found}
    fitted = (
        calibrate_many(
            model,
            tokenizer,
            texts,
            recipes=list(missing.values()),
            tokens=tokens,
            length=length,
            general=general,
            progress=progress,
        )
        if missing
        else []
    )
    for name, artifact in zip(missing, fitted, strict=True):
        found[name] = artifact
        if name in paths:
            save_artifact(artifact, paths[name])
    return {name: found[name] for name in recipes}


def fit_methods(
    model: Any, tokenizer: Any, texts: Sequence[str], methods: Sequence[Simulation]
) -> dict[str, Simulated]:
    """Subjects of simulated methods."""
    geometry = describe(model)
    identity = geometry.identity
    layers = geometry.select(quantize_sliding=False, skip_layers=(), skip_unsupported=True)
    length = min(SIMULATION_LENGTH, identity.context or SIMULATION_LENGTH)
    subjects = {}
    for method in methods:
        sequences = []
        if method.needs:
            if not texts:
                raise OscarError(
                    f"{method.name!r} is fitted to text; give some with --calibration-text"
                )
            sequences = calibration_sequences(
                texts, tokenizer, SIMULATION_TOKENS, length, min(length, 256)
            )
        fitted_to = f"{text_sha256(texts)[:16]} {identity.fingerprint[:32]}"
        subjects[method.name] = simulate_method(
            method,
            fit_simulation(model, method, sequences, layers),
            identity.kv_heads,
            identity.head_dim,
            fitted_to,
        )
    return subjects


def prepare(
    model: Any,
    tokenizer: Any,
    wanted: Sequence[Recipe | Simulation],
    texts: Sequence[str],
    *,
    tokens: int = DEFAULT_TOKENS,
    length: int | None = None,
    strict: bool = True,
    backend: str = "auto",
    keep: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Subject]:
    """Subjects of recipes and simulated methods, in the order they were named."""
    recipes = {r.name: r for r in wanted if isinstance(r, Recipe)}
    for recipe in recipes.values():
        if needs(recipe) and not texts:
            raise OscarError(
                f"recipe {recipe.name!r} is fitted to text; give some with --calibration-text"
            )
    artifacts = fit_artifacts(
        model, tokenizer, texts, recipes, tokens=tokens, length=length, keep=keep, progress=progress
    )
    methods = fit_methods(model, tokenizer, texts, [m for m in wanted if isinstance(m, Simulation)])
    return {
        each.name: Packed(artifacts[each.name], strict, backend)
        if each.name in artifacts
        else methods[each.name]
        for each in wanted
    }


def _kept(path: Path) -> Artifact:
    try:
        return load_artifact(path)
    except ArtifactError as error:
        raise OscarError(f"{error}; delete it to calibrate again") from None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
