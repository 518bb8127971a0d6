"""`oscarkv tune`: the bits of every layer, chosen for a model and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli import options
from oscarkv.cli.console import progress_bar, results

if TYPE_CHECKING:
    from oscarkv.evaluation.tune import Tuned


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
        int, typer.Option(help="Tokens of the windows that layers are measured on.")
    ] = 2048,
    windows: Annotated[int, typer.Option(min=1, help="Windows, spread over the text.")] = 2,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep finished work here, and go on from what is there."),
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
) -> None:
    """Choose how many bits every layer's keys and values get, within a budget.

    Rounds keys and values of each layer by themselves, measures what that costs on the text as it
    runs and where it looks up what came before, and gives more bits where they help most. Takes
    longer than calibrate; the artifact is used like any other.

    Example: oscarkv tune smollm2 --bits 2.3 --text train.txt -o tuned.safetensors
    """
    options.require_writable(output)
    text = [*text, *(more_text or [])]
    options.require_files(text)
    start = options.parse_recipe(recipe)

    from oscarkv.artifact import save_artifact
    from oscarkv.evaluation.fidelity import evaluation_windows
    from oscarkv.evaluation.tune import tune as find
    from oscarkv.integrations.transformers.text import read_texts

    texts = read_texts(text)
    loaded, tokenizer = options.load(model, device, dtype)
    evaluation_windows(loaded, tokenizer, texts, length, windows)  # refuse before calibrating
    with progress_bar("tuning") as progress:
        found = find(
            loaded,
            tokenizer,
            texts,
            bits,
            recipe=start,
            tokens=tokens,
            calibration_length=calibration_length,
            length=length,
            windows=windows,
            keep=resume,
            progress=progress,
        )
    save_artifact(found.artifact, output)
    results.print(_table(found))
    results.print(
        f"{output}: {found.artifact.bits():.3f} bits at 128K. KL on this text: {_change(found)}; "
        f"measure it on other text: oscarkv eval fidelity {model} --artifact {output} --text FILE",
        highlight=False,
        soft_wrap=True,
    )


def _change(found: Tuned) -> str:
    from oscarkv.evaluation.tune import KINDS

    return ", ".join(
        f"{found.base_kl[kind]:.4f} -> {found.predicted_kl[kind]:.4f} predicted ({kind})"
        for kind in KINDS
    )


def _table(found: Tuned) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from oscarkv.evaluation.tune import KINDS

    table = Table(
        box=SIMPLE_HEAD,
        title=f"{found.artifact.model.name}, {found.artifact.recipe.name}: layers with more bits",
        caption="KL of the layer's keys / values alone, with the fewest bits",
    )
    for heading in ("layer", "key bits", "value bits", *(f"KL, {kind}" for kind in KINDS)):
        table.add_column(heading, justify="right")
    for layer, (keys, values) in sorted(found.artifact.layer_bits.items()):
        alone = (found.alone[layer, "keys"], found.alone[layer, "values"])
        costs = (" / ".join(f"{cost[kind]:.5f}" for cost in alone) for kind in KINDS)
        table.add_row(str(layer), str(keys), str(values), *costs)
    return table
