"""`oscarkv calibrate`: text through a model, transforms into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oscarkv.cli import options
from oscarkv.cli.console import progress_bar, results, size


def calibrate(
    model: options.ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The artifact to write.")
    ],
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Plain UTF-8 text, a document a file."),
    ],
    more_text: options.MoreTexts = None,
    tokens: Annotated[int, typer.Option(min=1, help="About how many tokens to use.")] = 30000,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens a sequence.",
            show_default="4096, or the model's context if that is shorter",
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="The recipe to fit.")] = "balanced",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KNOB=VALUE", help="Change a knob of the recipe; repeat for more."
        ),
    ] = None,
    target_length: Annotated[
        int | None,
        typer.Option(
            help="Context to be good at: statistics are averaged over positions up to it.",
            show_default="the model's context, at most 32768",
        ),
    ] = None,
    general: Annotated[
        bool, typer.Option(help="Let the bundled general text count as much as yours.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Chooses the queries that are looked at.")] = 0,
    quantize_sliding: Annotated[
        bool, typer.Option("--quantize-sliding", help="Quantise sliding-window layers too.")
    ] = False,
    skip_layers: Annotated[
        str, typer.Option(metavar="N,N,...", help="Layers to leave in full precision.")
    ] = "",
    skip_unsupported: Annotated[
        bool, typer.Option("--skip-unsupported", help="Leave layers alone that cannot be done.")
    ] = False,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
) -> None:
    """Fit a recipe to a model, from plain text.

    Example: oscarkv calibrate smollm2 --text book.txt -o smollm2.safetensors
    """
    options.require_writable(output)
    text = [*text, *(more_text or [])]
    options.require_files(text)
    chosen = options.parse_recipe(recipe, changes or [])
    skipped = options.parse_layers(skip_layers)

    from oscarkv.artifact import save_artifact
    from oscarkv.artifact.summary import summarise
    from oscarkv.integrations.transformers.calibrate import calibrate as fit
    from oscarkv.integrations.transformers.text import read_texts

    texts = read_texts(text)
    loaded, tokenizer = options.load(model, device, dtype)
    with progress_bar("calibrating") as progress:
        artifact = fit(
            loaded,
            tokenizer,
            texts,
            recipe=chosen,
            tokens=tokens,
            length=length,
            target_length=target_length,
            seed=seed,
            general=general,
            quantize_sliding=quantize_sliding,
            skip_layers=skipped,
            skip_unsupported=skip_unsupported,
            progress=progress,
        )
    save_artifact(artifact, output)
    summary = summarise(artifact)
    error = summary.mean_logit_error
    results.print(
        f"{artifact.recipe.name} for {artifact.model.name}: {len(artifact.layers)} layers, "
        f"{summary.bits[131072]:.2f} bits at 128K{summary.bits_of}, mean predicted logit error "
        f"{'not measured' if error is None else f'{error:.4f}'}, "
        f"{summary.fallback_heads} of {summary.heads} heads fell back to Hadamard",
        highlight=False,
        soft_wrap=True,
    )
    if summary.more_bits:
        results.print(
            f"bits by layer: {summary.more_bits}. KL of rounding {summary.rounding}",
            highlight=False,
            soft_wrap=True,
        )
    results.print(
        f"wrote {output} ({size(output.stat().st_size)})", highlight=False, soft_wrap=True
    )
