"""`oscarkv eval`: what a recipe costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli import options
from oscarkv.cli.console import progress_bar, results, warn
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.evaluation.fidelity import Fidelity
    from oscarkv.recipe import Recipe

app = typer.Typer(no_args_is_help=True, help="Measure artifacts and recipes.")


@app.callback()
def _group() -> None:
    """Measure artifacts and recipes."""


@app.command("fidelity")
def fidelity(
    model: options.ModelArgument,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Text to measure on, a document a file."),
    ],
    more_text: options.MoreTexts = None,
    artifact: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="An artifact; repeat for more.")
    ] = None,
    recipes: Annotated[
        str, typer.Option(metavar="A,B,...", help="Recipes to fit first, then measure.")
    ] = "",
    calibration_text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to fit --recipes on; another one than --text."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens.")] = 30000,
    calibration_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Calibration tokens a sequence.",
            show_default="4096, or the model's context if that is shorter",
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens a window; from 512 on they count.")] = 4096,
    windows: Annotated[int, typer.Option(min=1, help="Windows, spread over the text.")] = 8,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict/--no-strict",
            help="--strict: every position reads the packed history, which is how decoding reads "
            "the cache. --no-strict: as a prompt is read, in chunks of 512 that are exact "
            "within themselves.",
        ),
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here.")
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Compare predictions with a packed cache to those with a full-precision cache.

    KL divergence, agreement of the most likely token, and perplexity, on the same windows for all.

    Example: oscarkv eval fidelity smollm2 --text eval.txt --recipes balanced,paper
    --calibration-text train.txt --json out.json
    """
    if json_file is not None:
        options.require_writable(json_file)
    text = [*text, *(more_text or [])]
    options.require_files([*text, *(calibration_text or []), *(artifact or [])])
    if not artifact and not recipes:
        raise OscarError("nothing to measure: give --artifact, --recipes or both")
    wanted = _recipes(recipes, bool(calibration_text))
    options.require_backend(backend)

    from oscarkv.artifact import load_artifact
    from oscarkv.evaluation.fidelity import evaluation_windows, measure_fidelity
    from oscarkv.integrations.transformers.cache import choose_backend
    from oscarkv.integrations.transformers.geometry import describe
    from oscarkv.integrations.transformers.text import read_texts, text_sha256

    artifacts: dict[str, Artifact] = {}
    for path in artifact or []:
        found = load_artifact(path)
        artifacts[_free_name(found.recipe.name, path.stem, {*artifacts, *_names(wanted)})] = found
    texts, calibration_texts = read_texts(text), read_texts(calibration_text or [])
    loaded, tokenizer = options.load(model, device, dtype)
    choose_backend(backend, loaded.device)  # refuse before calibrating
    identity = describe(loaded).identity
    for found in artifacts.values():
        found.model.require_match(identity)
    evaluation_windows(loaded, tokenizer, texts, length, windows)
    if wanted:
        artifacts |= _calibrate(
            loaded, tokenizer, calibration_texts, wanted, tokens, calibration_length
        )
    if any(a.calibration.get("text_sha256") == text_sha256(texts) for a in artifacts.values()):
        warn("calibrated and measured on the same text, which flatters the result")
    with progress_bar("measuring") as progress:
        result = measure_fidelity(
            loaded,
            tokenizer,
            texts,
            artifacts,
            length=length,
            windows=windows,
            strict=strict,
            backend=backend,
            progress=progress,
        )
    if json_file is not None:
        result.save(json_file)
    results.print(fidelity_table(result))


def _names(recipes: Sequence[Recipe]) -> set[str]:
    return {recipe.name for recipe in recipes}


def _free_name(name: str, stem: str, taken: set[str]) -> str:
    """The recipe's name, or the file's where recipes of that name are measured as well."""
    for candidate in (name, stem, f"{name} ({stem})"):
        if candidate not in taken:
            return candidate
    raise OscarError(f"two artifacts are both called {stem}; rename one file")


def _recipes(listed: str, has_text: bool) -> list[Recipe]:
    """The named recipes; refuses those that need text when there is none."""
    from oscarkv.methods import needs
    from oscarkv.recipe import Recipe

    names = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    found = [Recipe.named(name) for name in names]
    if not has_text:
        for recipe in found:
            if needs(recipe):
                raise OscarError(
                    f"recipe {recipe.name!r} is fitted to text; give some with --calibration-text"
                )
    return found


def _calibrate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    recipes: Sequence[Recipe],
    tokens: int,
    length: int | None,
) -> dict[str, Artifact]:
    from oscarkv.integrations.transformers.calibrate import calibrate_many

    with progress_bar("calibrating") as progress:
        fitted = calibrate_many(
            model,
            tokenizer,
            texts,
            recipes=recipes,
            tokens=tokens,
            length=length,
            progress=progress,
        )
    return {recipe.name: artifact for recipe, artifact in zip(recipes, fitted, strict=True)}


def fidelity_table(result: Fidelity) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    how = "as decoding reads the cache" if result.strict else "as prompts are read in chunks"
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{result.model}: {result.windows} x {result.length} tokens, {how}",
        caption=f"Perplexity with the full-precision cache: {result.perplexity:.2f}",
    )
    # Everything fits on 80 columns.
    table.add_column("recipe", min_width=max(len(name) for name in result.recipes))
    table.add_column("bits at\n128K", justify="right")
    table.add_column("KL", justify="right", min_width=len("0.0000 ± 0.0000"))
    table.add_column("top-1", no_wrap=True)
    table.add_column("ppl", justify="right", min_width=len("x1.000"))
    table.add_column(f"bits at\n{result.length}", justify="right")
    for name, score in sorted(result.recipes.items(), key=lambda item: item[1].kl):
        collapsed = " [red]collapsed[/red]" if score.collapsed else ""
        table.add_row(
            name,
            f"{score.bits_128k:.2f}",
            f"{score.kl:.4f} ± {score.kl_se:.4f}",
            f"{score.top1:5.1%}{collapsed}",
            f"x{score.ppl_ratio:.3f}",
            f"{score.bits_actual:.2f}",
        )
    return table
