"""The artifacts that several commands measure: files, and recipes that are fitted first."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli.console import progress_bar
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.recipe import Recipe

ArtifactOption = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="An artifact; repeat for more.")
]
RecipesOption = Annotated[
    str, typer.Option(metavar="A,B,...", help="Recipes to fit first, then measure.")
]
CalibrationTextOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text to fit --recipes on; repeat for more."),
]
TokensOption = Annotated[int, typer.Option("--tokens", min=1, help="Calibration tokens.")]


def recipes(listed: str, has_text: bool) -> list[Recipe]:
    """The named recipes; refuses those that need text when there is none."""
    from oscarkv.methods import needs
    from oscarkv.recipe import Recipe

    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    found = [Recipe.named(name) for name in names]
    for recipe in found:
        if needs(recipe) and not has_text:
            raise OscarError(
                f"recipe {recipe.name!r} is fitted to text; give some with --calibration-text"
            )
    return found


def load_artifacts(files: Sequence[Path], taken: Sequence[str] = ()) -> dict[str, Artifact]:
    """Artifacts by their recipe's name, or by their file's where that name is taken."""
    from oscarkv.artifact import load_artifact

    found: dict[str, Artifact] = {}
    for path in files:
        artifact = load_artifact(path)
        names = (artifact.recipe.name, path.stem, f"{artifact.recipe.name} ({path.stem})")
        free = [name for name in names if name not in found and name not in taken]
        if not free:
            raise OscarError(f"two artifacts are both called {path.stem}; rename one file")
        found[free[0]] = artifact
    return found


def with_windows(artifact: Artifact, sink: int | None, recent: int | None) -> Artifact:
    windows = {"sink": sink, "recent": recent}
    changed = {name: value for name, value in windows.items() if value is not None}
    return dataclasses.replace(artifact, recipe=artifact.recipe.replace(**changed))


def fit(
    model: Any, tokenizer: Any, texts: Sequence[str], wanted: Sequence[Recipe], tokens: int
) -> dict[str, Artifact]:
    if not wanted:
        return {}
    from oscarkv.integrations.transformers.calibrate import calibrate_many

    with progress_bar("calibrating") as progress:
        fitted = calibrate_many(
            model, tokenizer, texts, recipes=wanted, tokens=tokens, progress=progress
        )
    return {recipe.name: artifact for recipe, artifact in zip(wanted, fitted, strict=True)}


def about() -> dict[str, Any]:
    """The command, the machine and its versions, for a record."""
    from oscarkv.benchmark import machine

    gpus = machine.gpus()
    return {
        "device": gpus[0].name if gpus else machine.processor(),
        "command": shlex.join(["oscarkv", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": machine.versions(),
    }


def describe_setting(artifact: Artifact) -> dict[str, Any]:
    """What a record says of a setting."""
    recipe = artifact.recipe
    return {
        "recipe": recipe.name,
        "bits_128k": recipe.bits(artifact.model.head_dim),
        "sink": recipe.sink,
        "recent": recipe.recent,
    }


def lengths(text: str) -> list[int]:
    """Lengths from "4k,8192"."""
    from oscarkv.benchmark.serving_plan import parse_length

    found = sorted({parse_length(part) for part in text.split(",") if part.strip()})
    if not found:
        raise OscarError("no --lengths; write for instance 4k,8k")
    return found
