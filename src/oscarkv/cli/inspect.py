"""`oscarkv inspect`: what is in an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli.console import results

if TYPE_CHECKING:
    from rich.table import Table

    from oscarkv.artifact.summary import ArtifactSummary


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An artifact.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what an artifact was made for, from and with, and how well each layer should do."""
    from oscarkv.artifact import load_artifact
    from oscarkv.artifact.summary import summarise

    summary = summarise(load_artifact(file))
    if as_json:
        typer.echo(json.dumps(summary.to_json(), indent=2))
        return
    results.print(_facts(summary))
    results.print(_layers(summary))


def _facts(summary: ArtifactSummary) -> Table:
    from rich.table import Table

    model = summary.model
    bits = [f"{length // 1024}K: {bits:.2f}" for length, bits in summary.bits.items()]
    knobs = [f"{knob}={value}" for knob, value in summary.knobs.items()]
    facts = [
        f"{name} {value}"
        for name, value in summary.calibration.items()
        if value != [] and name != "layer_costs"
    ]
    error = summary.mean_logit_error
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("model", f"{model['name']} ({model['architecture']})"),
        (
            "geometry",
            f"{model['layers']} layers, {model['query_heads']} query and {model['kv_heads']} KV "
            f"heads of {model['head_dim']}, context {model['context']}",
        ),
        ("recipe", f"{summary.recipe} ({', '.join(knobs) or 'all knobs at their defaults'})"),
        ("calibration", ", ".join(facts) or "none"),
        ("bits per element", f"{', '.join(bits)}{summary.bits_of}"),
        ("bits by layer", summary.more_bits or "the same in all"),
        *([("KL by more bits", summary.rounding)] if summary.rounding else []),
        ("mean logit error", "not measured" if error is None else f"{error:.4f}"),
        ("inverse error", f"{summary.inverse_error:.1e}"),
        ("fallback heads", f"{summary.fallback_heads} of {summary.heads}"),
        ("written by", f"oscarkv {summary.library_version}"),
    ):
        table.add_row(f"[bold]{name}[/bold]", _escape(value))
    return table


def _layers(summary: ArtifactSummary) -> Table:
    from rich.table import Table

    table = Table(caption="Energy: of the stored keys, by principal axis. Errors: relative.")
    mixed = len({(layer.key_bits, layer.value_bits) for layer in summary.layers}) > 1
    for heading in (
        "layer",
        *(["bits K, V"] if mixed else []),
        "top 1",
        "top 8",
        "eff. rank",
        "cond(A)",
        "logit error",
        "value error",
    ):
        table.add_column(heading, justify="right")
    table.add_column("fallback heads")
    for layer in summary.layers:
        table.add_row(
            str(layer.layer),
            *([f"{layer.key_bits}, {layer.value_bits}"] if mixed else []),
            _figure(layer.top1, ".1%"),
            _figure(layer.top8, ".1%"),
            _figure(layer.effective_rank, ".1f"),
            _figure(layer.condition, ".3g"),
            _figure(layer.logit_error, ".4f"),
            _figure(layer.value_error, ".4f"),
            ", ".join(map(str, layer.fallback)),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
