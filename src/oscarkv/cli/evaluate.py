"""`oscarkv eval`: what a recipe costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli import gather, options
from oscarkv.cli.console import interruptible, progress_bar, results, warn
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.evaluation.checkpoint import Checkpoint
    from oscarkv.evaluation.fidelity import Fidelity
    from oscarkv.evaluation.subjects import Subject
    from oscarkv.methods.simulation import Simulation
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
    lengths: Annotated[
        str,
        typer.Option(
            metavar="LENGTH:WINDOWS,...",
            help="Other lengths to measure as well, for instance 8192:4,16384:2,32768:1.",
        ),
    ] = "",
    sensitivity: Annotated[
        str,
        typer.Option(
            metavar="PARTS",
            help="Where the error comes from: sides (keys, values), layers, heads, or several, "
            "comma-separated. Each part is rounded by itself.",
        ),
    ] = "",
    part_windows: Annotated[int, typer.Option(min=1, help="Windows for --sensitivity.")] = 2,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep finished work here, and go on from what is there."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here.")
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Compare predictions with a packed cache to those with a full-precision cache.

    KL divergence, agreement of the most likely token, and perplexity, on the same windows for all.
    Published methods that the packed format cannot hold (kivi-2bit, kvquant-3bit, rotatekv-2bit,
    turboquant-3bit) are simulated; NAME-alone keeps only the tokens exact that its paper keeps.

    Example: oscarkv eval fidelity smollm2 --text eval.txt --recipes balanced,paper
    --calibration-text train.txt --json out.json
    """
    if json_file is not None:
        options.require_writable(json_file)
    text = [*text, *(more_text or [])]
    options.require_files([*text, *(calibration_text or []), *(artifact or [])])
    if not artifact and not recipes:
        raise OscarError("nothing to measure: give --artifact, --recipes or both")
    wanted = gather.methods(recipes, bool(calibration_text))
    if not strict:
        _require_packed(wanted)
    sizes = [(length, windows), *_lengths(lengths)]
    parts = _parts(sensitivity)
    options.require_backend(backend)

    from oscarkv.artifact import load_artifact
    from oscarkv.evaluation.checkpoint import Checkpoint
    from oscarkv.evaluation.fidelity import evaluation_windows, measure_fidelity
    from oscarkv.evaluation.prepare import prepare
    from oscarkv.evaluation.subjects import Packed
    from oscarkv.integrations.transformers.cache import choose_backend
    from oscarkv.integrations.transformers.geometry import describe
    from oscarkv.integrations.transformers.text import read_texts, text_sha256

    names = {each.name for each in wanted}
    subjects: dict[str, Subject] = {}
    for path in artifact or []:
        found = load_artifact(path)
        name = _free_name(found.recipe.name, path.stem, {*subjects, *names})
        subjects[name] = Packed(found, strict, backend)
    if parts:
        opened = [s.artifact.recipe for s in subjects.values() if isinstance(s, Packed)]
        _require_rounding([*opened, *wanted][0])
    texts, calibration_texts = read_texts(text), read_texts(calibration_text or [])
    loaded, tokenizer = options.load(model, device, dtype)
    choose_backend(backend, loaded.device)  # refuse before calibrating
    identity = describe(loaded).identity
    for subject in subjects.values():
        if isinstance(subject, Packed):
            subject.artifact.model.require_match(identity)
    for each_length, each_windows in [*sizes, *([(length, part_windows)] if parts else [])]:
        evaluation_windows(loaded, tokenizer, texts, each_length, each_windows)
    checkpoint = Checkpoint(resume)
    with progress_bar("calibrating") as progress:
        subjects |= prepare(
            loaded,
            tokenizer,
            wanted,
            calibration_texts,
            tokens=tokens,
            length=calibration_length,
            strict=strict,
            backend=backend,
            keep=resume,
            progress=progress,
        )
    artifacts = [s.artifact for s in subjects.values() if isinstance(s, Packed)]
    if any(a.calibration.get("text_sha256") == text_sha256(texts) for a in artifacts):
        warn("calibrated and measured on the same text, which flatters the result")
    measured = []
    for each_length, each_windows in sizes:
        with progress_bar(f"measuring at {each_length}") as progress:
            measured.append(
                measure_fidelity(
                    loaded,
                    tokenizer,
                    texts,
                    subjects,
                    length=each_length,
                    windows=each_windows,
                    strict=strict,
                    backend=backend,
                    progress=progress,
                    checkpoint=checkpoint,
                )
            )
    result, *result.longer = measured
    if json_file is not None:
        result.save(json_file)
    for each in (result, *result.longer):
        results.print(fidelity_table(each))
    if parts:
        name, subject = next(iter(subjects.items()))
        with interruptible("the fidelity is", json_file):
            result.sensitivity[name] = _sensitivity(
                loaded, tokenizer, texts, subject, parts, length, part_windows, checkpoint
            )
        if json_file is not None:
            result.save(json_file)
        results.print(sensitivity_table(name, result.sensitivity[name]))


def _require_packed(wanted: Sequence[Recipe | Simulation]) -> None:
    from oscarkv.recipe import Recipe

    for each in wanted:
        if not isinstance(each, Recipe):
            raise OscarError(f"{each.name} is simulated, which is measured strictly only")


def _require_rounding(first: Recipe | Simulation) -> None:
    from oscarkv.recipe import Recipe

    if isinstance(first, Recipe) and first.exact:
        raise OscarError(
            f"--sensitivity is measured of the first recipe, and {first.name!r} rounds nothing; "
            "name another one first"
        )


def _free_name(name: str, stem: str, taken: set[str]) -> str:
    """The recipe's name, or the file's where recipes of that name are measured as well."""
    for candidate in (name, stem, f"{name} ({stem})"):
        if candidate not in taken:
            return candidate
    raise OscarError(f"two artifacts are both called {stem}; rename one file")


def _lengths(listed: str) -> list[tuple[int, int]]:
    try:
        pairs = [part.split(":") for part in listed.split(",") if part.strip()]
        found = [(int(length), int(windows)) for length, windows in pairs]
    except ValueError:
        raise OscarError(
            f"--lengths {listed}: write LENGTH:WINDOWS, for instance 8192:4,16384:2"
        ) from None
    for length, windows in found:
        if windows < 1:
            raise OscarError(f"--lengths {length}:{windows}: a length needs at least one window")
    return found


def _parts(listed: str) -> list[str]:
    from oscarkv.evaluation.sensitivity import PARTS

    parts = [part.strip() for part in listed.split(",") if part.strip()]
    for part in parts:
        if part not in PARTS:
            raise OscarError(f"--sensitivity {part}: choose from {', '.join(PARTS)}")
    return parts


def _sensitivity(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    subject: Subject,
    parts: Sequence[str],
    length: int,
    windows: int,
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    from oscarkv.evaluation.sensitivity import measure_sensitivity
    from oscarkv.evaluation.subjects import Packed, Simulated, simulate_artifact

    if isinstance(subject, Packed):
        subject = simulate_artifact(subject.artifact, model.device)
    assert isinstance(subject, Simulated)
    with progress_bar("measuring parts") as progress:
        found = measure_sensitivity(
            model,
            tokenizer,
            texts,
            subject,
            parts=parts,
            length=length,
            windows=windows,
            checkpoint=checkpoint,
            progress=progress,
        )
    return found.to_json()


def sensitivity_table(name: str, found: dict[str, Any]) -> Any:
    """The parts that cost most."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        title=f"{name}: KL with one part rounded, the rest exact",
        caption="The twenty parts that cost most; --json has all of them",
    )
    for heading in ("part", "layer", "KV head"):
        table.add_column(heading)
    table.add_column("KL", justify="right")
    for part in sorted(found["parts"], key=lambda part: -part["kl"])[:20]:
        layer, head = ("all" if part[k] is None else str(part[k]) for k in ("layer", "head"))
        table.add_row(part["sides"], layer, head, f"{part['kl']:.5f}")
    return table


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
