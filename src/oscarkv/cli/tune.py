"""`oscarkv tune`: the bits of every layer, chosen for a model and a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from oscarkv.cli import options
from oscarkv.cli.console import progress_bar, results


def tune(
    model: options.ModelArgument,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Text to fit and to measure on, a document a file."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Artifact to write.")
    ],
    bits: Annotated[
        # Named, as is --model of zoo: typer 0.27 takes a metavar of the same letters for a name.
        float,
        typer.Option("--bits", metavar="BITS", help="Most bits an element at 128K, all included."),
    ] = 2.3,
    more_text: options.MoreTexts = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe to start from; compact leaves most bits for codes.")
    ] = "compact",
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens.")] = 30000,
    calibration_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Calibration tokens a sequence.",
            show_default="4096, or the model's context if that is shorter",
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(help="Tokens of the sequences that layers are measured on.")
    ] = 2048,
    windows: Annotated[
        int,
        typer.Option(min=1, help="Sequences of your text, and as many of the general one."),
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep finished work here, and go on from what is there."),
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
) -> None:
    """Calibrate for another budget than the 2.3 bits of `balanced`.

    Rounds keys and values of each layer by themselves, measures what that costs on text as it
    runs and where it looks up what came before, and gives a third bit where it helps most. Shows
    what was measured.

    Example: oscarkv tune smollm2 --bits 2.3 --text train.txt -o tuned.safetensors
    """
    options.require_writable(output)
    text = [*text, *(more_text or [])]
    options.require_files(text)
    start = options.parse_recipe(recipe)

    from oscarkv.artifact import save_artifact
    from oscarkv.artifact.summary import summarise
    from oscarkv.calibration.budget import affordable
    from oscarkv.errors import OscarError
    from oscarkv.evaluation.checkpoint import Checkpoint
    from oscarkv.evaluation.prepare import fit_artifacts
    from oscarkv.integrations.transformers.geometry import describe
    from oscarkv.integrations.transformers.layer_costs import share_out, shortest_measured
    from oscarkv.integrations.transformers.text import read_texts

    # A name of its own: records of measurements go by it.
    wanted = start.replace(budget=bits, name=f"tuned-{bits:g}")
    if length < shortest_measured(wanted):
        raise OscarError(
            f"--length {length}: a passage that comes again must lie beyond the "
            f"{wanted.sink + wanted.recent} exact tokens; take {shortest_measured(wanted)} or more"
        )
    texts = read_texts(text)
    loaded, tokenizer = options.load(model, device, dtype)
    found = describe(loaded).identity
    if affordable(wanted, found.head_dim, found.layers, bits) < 0:
        raise OscarError(
            f"--bits {bits}: recipe {start.name!r} takes {wanted.bits(found.head_dim):.3f} bits at "
            f"128K with {start.key_bits} for every code; ask for more, or for a recipe with "
            "smaller parameters (compact)"
        )
    done = Checkpoint(resume)  # first: it makes the directory, or says at once why it cannot
    with progress_bar("tuning") as progress:
        base = fit_artifacts(
            loaded,
            tokenizer,
            texts,
            {start.name: start.uniform},
            tokens=tokens,
            length=calibration_length,
            keep=resume,
            progress=progress,
        )[start.name]
        artifact = share_out(
            loaded,
            tokenizer,
            texts,
            replace(base, recipe=wanted),
            length=length,
            count=windows,
            known=done,
            progress=progress,
        )
    save_artifact(artifact, output)
    costs: dict[str, Any] = artifact.calibration.get("layer_costs", {})
    if costs:
        results.print(_table(artifact, costs))
    summary = summarise(artifact)
    results.print(
        f"{output}: {artifact.bits():.3f} bits at 128K. KL on this text: "
        f"{summary.rounding or 'the same'}; "
        f"measure it on other text: oscarkv eval fidelity {model} --artifact {output} --text FILE",
        highlight=False,
        soft_wrap=True,
    )


def _table(artifact: Any, costs: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        title=f"{artifact.model.name}, {artifact.recipe.name}: layers with more bits",
        caption="KL of the layer's keys / values alone, with the fewest bits",
    )
    kinds = list(costs["all"])
    for heading in ("layer", "key bits", "value bits", *(f"KL, {kind}" for kind in kinds)):
        table.add_column(heading, justify="right")
    for layer, (keys, values) in sorted(artifact.layer_bits.items()):
        alone = [costs["alone"].get(f"{side} {layer}", {}) for side in ("keys", "values")]
        shown = (" / ".join(f"{c[kind]:.5f}" if c else "-" for c in alone) for kind in kinds)
        table.add_row(str(layer), str(keys), str(values), *shown)
    return table
