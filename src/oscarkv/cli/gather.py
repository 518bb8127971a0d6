"""The artifacts that several commands measure: files, and recipes that are fitted first."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli.console import progress_bar
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.methods.simulation import Simulation
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


def methods(listed: str, has_text: bool) -> list[Recipe | Simulation]:
    """The named recipes and simulated methods; refuses those that need text when there is none."""
    from oscarkv.methods import named, needs
    from oscarkv.recipe import Recipe

    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    found = [named(name) for name in names]
    if not has_text:
        for each in found:
            if needs(each) if isinstance(each, Recipe) else each.needs:
                raise OscarError(
                    f"recipe {each.name!r} is fitted to text; give some with --calibration-text"
                )
    return found


def recipes(listed: str, has_text: bool) -> list[Recipe]:
    """The same, of recipes alone: what can be packed."""
    from oscarkv.recipe import Recipe

    found = []
    for each in methods(listed, has_text):
        if not isinstance(each, Recipe):
            raise OscarError(
                f"{each.name!r} is simulated and can only be measured by eval fidelity and compare"
            )
        found.append(each)
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


def calibrate_apart(source: str, path: Path, files: Sequence[Path], tokens: int) -> None:
    """Fit the default recipe in a process of its own, which gives its memory back to the engine.
    Without text of the user's, to the book that comes with the package."""
    book = resources.files("oscarkv.demo") / "texts" / "alice.txt"
    with resources.as_file(book) as default:
        words = [word for file in files or [default] for word in ("--text", str(file))]
        words = ["calibrate", source, *words, "--tokens", str(tokens), "-o", str(path)]
        program = "import sys; from oscarkv.cli import main; sys.argv[0] = 'oscarkv'; main()"
        done = subprocess.run([sys.executable, "-c", program, *words], check=False)
    if done.returncode:
        raise OscarError(f"calibrating {source} failed; see above, or give --artifact")


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


def describe_weights(model: Any) -> dict[str, Any]:
    """What a record says of a loaded model, in all of its settings."""
    from oscarkv.integrations.transformers.geometry import describe

    dtype = str(model.dtype).removeprefix("torch.")
    return {"dtype": dtype, "weights": describe(model).identity.fingerprint}


def describe_backend(name: str, model: Any) -> dict[str, Any]:
    """What reads the packed caches of a loaded model: `auto` is what it comes to here."""
    from oscarkv.integrations.transformers.cache import choose_backend

    return {"backend": choose_backend(name, model.device).name}


def describe_settings(
    artifacts: Mapping[str, Artifact], *, shared: Mapping[str, Any], packed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What a record says of full precision and of every artifact. `shared` holds for all of them,
    `packed` for those with an artifact."""
    from oscarkv.evaluation.tasks.record import REFERENCE

    settings: dict[str, dict[str, Any]] = {REFERENCE: {"bits_128k": 16.0, **shared}}
    for name, artifact in artifacts.items():
        settings[name] = {**describe_setting(artifact), **shared, **packed}
    return settings


def describe_setting(artifact: Artifact) -> dict[str, Any]:
    """What a record says of an artifact."""
    recipe = artifact.recipe
    return {
        "recipe": recipe.name,
        "bits_128k": artifact.bits(),
        "sink": recipe.sink,
        "recent": recipe.recent,
        "sha256": _digest(artifact),
    }


def _digest(artifact: Artifact) -> str:
    """The same for artifacts that give the same answers."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(artifact.recipe)).encode())
    for index, layer in sorted(artifact.layers.items()):
        digest.update(json.dumps(dataclasses.asdict(artifact.layer_recipe(index))).encode())
        for name, tensor in sorted(layer.tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def same_settings(
    earlier: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """All settings of a record that is gone on with; refuses a name that meant something else.
    What an older record does not say of a setting is not compared."""
    for name, setting in now.items():
        before = earlier.get(name, {})
        changed = [
            key
            for key, value in setting.items()
            if key in before and not _agree(key, before[key], value)
        ]
        if changed:
            raise OscarError(
                f"the file given with --json holds answers of {name} with another "
                f"{', '.join(changed)}; move it away, or give another name"
            )
    return earlier | now


def _agree(key: str, before: Any, now: Any) -> bool:
    if key != "weights":
        return bool(before == now)
    from oscarkv.artifact.artifact import same_weights

    return same_weights(str(before), str(now))


def lengths(text: str) -> list[int]:
    """Lengths from "4k,8192"."""
    from oscarkv.benchmark.serving_plan import parse_length

    found = sorted({parse_length(part) for part in text.split(",") if part.strip()})
    if not found:
        raise OscarError("no --lengths; write for instance 4k,8k")
    return found
