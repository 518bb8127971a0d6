"""`oscarkv compare`: everything measured of a model's recipes, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from oscarkv.cli import gather, options
from oscarkv.cli.console import errors, progress_bar, results
from oscarkv.errors import OscarError


def compare(
    model: options.ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="The page: an .html file.")
    ] = Path("oscarkv-compare.html"),
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A record of eval fidelity, needle or tasks; repeat for more.",
        ),
    ] = None,
    recipes: gather.RecipesOption = "",
    artifact: gather.ArtifactOption = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to measure on; repeat for more."),
    ] = None,
    calibration_text: gather.CalibrationTextOption = None,
    tokens: gather.TokensOption = 30000,
    length: Annotated[int, typer.Option(help="Fidelity: tokens a window.")] = 4096,
    windows: Annotated[int, typer.Option(min=1, help="Fidelity: windows.")] = 8,
    needle_lengths: Annotated[
        str, typer.Option(metavar="N,...", help="Needles: lengths such as 4k,8k; or none.")
    ] = "none",
    trials: Annotated[
        int, typer.Option(min=1, help="Needles: questions of each kind and length, in fours.")
    ] = 100,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where records of what is measured go; a run goes on from there.",
            show_default="beside the page",
        ),
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Put accuracy, needles and tasks of several recipes on one page.

    With --from, from records that are there already: no model is loaded. With --recipes or
    --artifact, fidelity and needles are measured first. Tasks come from `oscarkv eval tasks`.

    Example: oscarkv compare smollm2 --recipes balanced,compact,paper --text eval.txt
    --calibration-text train.txt --from tasks.json -o report.html
    """
    from oscarkv.evaluation.compare.page import require_matplotlib
    from oscarkv.evaluation.compare.report import write_report
    from oscarkv.evaluation.compare.sources import read_sources

    options.require_writable(output)
    require_matplotlib()
    options.require_files(records or [])
    found = list(records or [])
    name = model
    if recipes or artifact:
        name, made = _measure(
            model,
            keep or output.with_name(f"{output.stem}-records"),
            recipes,
            artifact or [],
            text or [],
            calibration_text or [],
            tokens,
            length,
            windows,
            [] if needle_lengths == "none" else gather.lengths(needle_lengths),
            trials,
            (device, dtype, backend),
        )
        found += made
    if not found:
        raise OscarError("nothing to show: give --from records, or --recipes or --artifact")
    comparison = read_sources(Path(name).name if Path(name).exists() else name, found)
    if not (recipes or artifact) and len(comparison.models) == 1:
        comparison.model = comparison.models[0]
    write_report(comparison, output)
    results.print(f"wrote {output}", highlight=False, soft_wrap=True)


def _measure(
    source: str,
    folder: Path,
    recipes: str,
    artifact: list[Path],
    text: list[Path],
    calibration_text: list[Path],
    tokens: int,
    length: int,
    windows: int,
    lengths: list[int],
    trials: int,
    place: tuple[str | None, str, str],
) -> tuple[str, list[Path]]:
    """Measure fidelity, and needles where lengths are given; returns their records."""
    if not text:
        raise OscarError("--recipes and --artifact are measured on --text; give some")
    options.require_files([*text, *calibration_text, *artifact])
    wanted = gather.methods(recipes, bool(calibration_text))
    device, dtype, backend = place
    options.require_backend(backend)
    artifacts = gather.load_artifacts(artifact, [each.name for each in wanted])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OscarError(f"cannot keep records in {folder}: {error.strerror or error}") from None

    from oscarkv.evaluation.checkpoint import Checkpoint
    from oscarkv.evaluation.fidelity import evaluation_windows, measure_fidelity
    from oscarkv.evaluation.prepare import prepare
    from oscarkv.evaluation.subjects import Packed, Subject
    from oscarkv.integrations.transformers.geometry import describe
    from oscarkv.integrations.transformers.text import read_texts

    texts = read_texts(text)
    loaded, tokenizer = options.load(source, device, dtype)
    identity = describe(loaded).identity
    for one in artifacts.values():
        one.model.require_match(identity)
    evaluation_windows(loaded, tokenizer, texts, length, windows)  # refuse before calibrating
    subjects: dict[str, Subject] = {
        name: Packed(one, True, backend) for name, one in artifacts.items()
    }
    with progress_bar("calibrating") as progress:
        subjects |= prepare(
            loaded,
            tokenizer,
            wanted,
            read_texts(calibration_text),
            tokens=tokens,
            backend=backend,
            keep=folder,
            progress=progress,
        )
    written = [folder / "fidelity.json"]
    with progress_bar("measuring") as progress:
        fidelity = measure_fidelity(
            loaded,
            tokenizer,
            texts,
            subjects,
            length=length,
            windows=windows,
            backend=backend,
            progress=progress,
            checkpoint=Checkpoint(folder),
        )
    fidelity.save(written[0])
    if lengths:
        written.append(folder / "needle.json")
        artifacts = {name: s.artifact for name, s in subjects.items() if isinstance(s, Packed)}
        _needles(loaded, tokenizer, texts, artifacts, lengths, trials, backend, written[1])
    names = ", ".join(str(path) for path in written)
    errors.print(f"records: {names}", markup=False, highlight=False, soft_wrap=True)
    return identity.name, written


def _needles(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    artifacts: dict[str, Any],
    lengths: list[int],
    trials: int,
    backend: str,
    path: Path,
) -> None:
    from oscarkv.evaluation.needle import REFERENCE, fresh, load_needles, measure_needles
    from oscarkv.evaluation.needle_prompts import ASKED, Haystack
    from oscarkv.integrations.transformers.geometry import describe

    described = gather.describe_settings(
        artifacts,
        shared=gather.describe_weights(model),
        packed=gather.describe_backend(backend, model),
    )
    earlier = load_needles(path) if path.exists() else None
    record = fresh(
        describe(model).identity.name,
        texts,
        lengths,
        -(-trials // ASKED),
        gather.same_settings(earlier.settings if earlier else {}, described),
        chat=False,
        strict=False,
        chunk=512,
        about=gather.about(),
        earlier=earlier,
    )
    with progress_bar("needles") as progress:
        measure_needles(
            model,
            Haystack(tokenizer, texts),
            {REFERENCE: None, **artifacts},
            record,
            backend=backend,
            path=path,
            progress=progress,
        )
    record.save(path)
