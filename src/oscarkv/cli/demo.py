"""`oscarkv demo`: everything at once, on the embedded model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oscarkv.cli import options
from oscarkv.cli.console import errors, progress_bar, results, size

if TYPE_CHECKING:
    from oscarkv.demo.run import DemoResult


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML report to write.")
    ] = Path("oscarkv-demo.html"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Less text and one prompt: about a minute.")
    ] = False,
    device: options.DeviceOption = None,
) -> None:
    """Calibrate, measure and generate with SmolLM2-135M, and write a report.

    Takes a few minutes on two CPU cores. The report is one HTML file without outside resources.
    """
    options.require_writable(output)
    from oscarkv.evaluation.compare.page import require_matplotlib

    require_matplotlib()
    from oscarkv.demo.run import FULL, QUICK, calibrate, generate, measure

    plan = QUICK if quick else FULL
    start = time.perf_counter()
    model, tokenizer = options.load("smollm2", device)
    with progress_bar("calibrating") as progress:
        artifacts = calibrate(model, tokenizer, plan, progress)
    with progress_bar("measuring") as progress:
        fidelity = measure(model, tokenizer, artifacts, plan, progress)
    with progress_bar("generating") as progress:
        result = generate(model, tokenizer, artifacts, fidelity, plan, progress)
    result.seconds = time.perf_counter() - start

    from oscarkv.demo.report import write_report

    write_report(result, output)
    _print(result)
    results.print(
        f"wrote {output} ({size(output.stat().st_size)})", highlight=False, soft_wrap=True
    )


def _print(result: DemoResult) -> None:
    from oscarkv.cli.evaluate import fidelity_table

    results.print(fidelity_table(result.fidelity))
    for pair in result.pairs:
        results.print(
            f"{pair.title}: {pair.stock.cached} tokens, cache {size(pair.stock.serving)} in bf16, "
            f"{size(pair.packed.serving)} packed ({pair.packed.bits:.2f} bits per element); "
            f"{pair.verdict}",
            highlight=False,
            soft_wrap=True,
        )
    errors.print(f"took {result.seconds:.0f} s", highlight=False)
