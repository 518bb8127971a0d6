"""Options that several commands share, and checks that are made before a model is loaded."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli.console import errors, show_log
from oscarkv.errors import OscarError, RecipeError

if TYPE_CHECKING:
    from oscarkv.recipe import Recipe

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a .gguf file, a hub id (org/name), or smollm2, the embedded one.",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; cuda where there is one.")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16 for the weights.")
]

BackendOption = Annotated[
    str, typer.Option("--backend", help="auto, cuda, triton or torch; auto takes the fastest.")
]


def load(source: str, device: str | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer, without the progress bars of other libraries."""
    show_log()
    with errors.status(f"loading {source}"):
        from oscarkv.integrations.transformers.models import load_model

        quiet_transformers()
        model, tokenizer = load_model(source, dtype=dtype, device=device)
    return model, tokenizer


MoreTexts = Annotated[list[Path] | None, typer.Argument(metavar="TEXT", hidden=True)]


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def require_backend(name: str) -> None:
    """Refuse a backend that cannot run here, before a model is loaded for it."""
    if name != "auto":
        from oscarkv.kernels import get_backend

        get_backend(name)


def require_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            what = "is a directory, not a file" if path.is_dir() else "does not exist"
            raise OscarError(f"{path} {what}")


def require_writable(path: Path) -> None:
    """Refuse an output that could not be written, before minutes of work go into it."""
    if path.is_dir():
        raise OscarError(f"cannot write {path}: it is a directory; name a file")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise OscarError(f"cannot write {path}: there is no directory {parent}")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OscarError(f"cannot write {path}: {error.strerror or error}") from None


def parse_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A preset with `KNOB=VALUE` changes."""
    from oscarkv.recipe import Recipe

    types = {field.name: str(field.type) for field in dataclasses.fields(Recipe)}
    knobs = {}
    for change in changes:
        knob, equals, value = change.partition("=")
        if not equals:
            raise RecipeError(f"--set {change}: write it as KNOB=VALUE, for instance sink=128")
        knobs[knob] = _parse_value(knob, value, types.get(knob, "str"))
    return Recipe.named(name, **knobs)


def _parse_value(knob: str, value: str, kind: str) -> Any:
    text = value.strip()
    if "None" in kind and text.lower() == "none":
        return None
    if kind == "bool":
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise RecipeError(f"--set {knob}={value}: {knob} is true or false")
        return words[text.lower()]
    try:
        if kind.startswith("int"):
            return int(text)
        return float(text) if kind == "float" else text
    except ValueError:
        number = "a whole number" if kind.startswith("int") else "a number"
        raise RecipeError(f"--set {knob}={value}: {knob} takes {number}") from None


def parse_layers(text: str) -> tuple[int, ...]:
    """Layers from "0,1,29"."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OscarError(f"--skip-layers {text}: write layer numbers like 0,1,29") from None


def engine_options(texts: Sequence[str]) -> dict[str, Any]:
    """`--engine-option NAME=JSON`, as given: arguments of an engine's own."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise OscarError(f"--engine-option {text}: write NAME=JSON, for instance seed=1")
    return found
