"""`oscarkv zoo`: rotations in the public RotationZoo format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oscarkv.cli import options
from oscarkv.cli.console import results

app = typer.Typer(no_args_is_help=True, help="Bring RotationZoo .pt files in, or write them.")


@app.command("import")
def import_(
    keys: Annotated[Path, typer.Argument(metavar="K.pt", help="Rotations of the keys.")],
    values: Annotated[Path, typer.Argument(metavar="V.pt", help="Rotations of the values.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="The model they belong to: as for calibrate."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The artifact to write.")
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="How rows are encoded.",
            show_default="paper, or paper-per-head for files with a rotation per head",
        ),
    ] = None,
    skip_layers: Annotated[
        str, typer.Option(metavar="N,N,...", help="Layers to leave in full precision.")
    ] = "",
) -> None:
    """Make an artifact from a pair of RotationZoo files (versions 1 and 2).

    The files are pickles; only tensors are read from them, and no code in them is run.
    """
    options.require_writable(output)
    options.require_files([keys, values])
    chosen = options.parse_recipe(recipe) if recipe else None
    skipped = options.parse_layers(skip_layers)

    from oscarkv.artifact import save_artifact
    from oscarkv.artifact.zoo import import_zoo
    from oscarkv.integrations.transformers.geometry import describe

    loaded, _ = options.load(model)
    geometry = describe(loaded)
    layers = geometry.select(quantize_sliding=False, skip_layers=skipped, skip_unsupported=False)
    artifact = import_zoo(keys, values, geometry.identity, layers=layers, recipe=chosen)
    save_artifact(artifact, output)
    results.print(
        f"{artifact.recipe.name} for {geometry.identity.name}: {len(layers)} layers; "
        f"wrote {output}",
        highlight=False,
        soft_wrap=True,
    )


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An artifact of pure rotations.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the two files go.")
    ],
) -> None:
    """Write an artifact's rotations as RotationZoo files, for the reference implementation.

    Only recipes that rotate and nothing else (paper, quarot-int2) can be written in that format.
    """
    from oscarkv.artifact import load_artifact
    from oscarkv.artifact.zoo import export_zoo

    for path in export_zoo(load_artifact(file), output):
        results.print(f"wrote {path}", highlight=False, soft_wrap=True)
