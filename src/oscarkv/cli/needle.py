"""`oscarkv eval needle`: facts hidden in long texts, with full precision and with packed caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oscarkv.cli import gather, options
from oscarkv.cli.console import interruptible, progress_bar, results
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.evaluation.needle import Needles

TABLE_WIDTH = 130


def needle(
    model: options.ModelArgument,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Text to hide facts in, a document a file."),
    ],
    more_text: options.MoreTexts = None,
    artifact: gather.ArtifactOption = None,
    recipes: gather.RecipesOption = "",
    calibration_text: gather.CalibrationTextOption = None,
    tokens: gather.TokensOption = 30000,
    sink: Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")] = None,
    recent: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens of the prompts, such as 4k,8k,16k,32k.")
    ] = "4k,8k,16k,32k",
    trials: Annotated[
        int,
        typer.Option(min=1, help="Questions with one needle, of each kind and length; in fours."),
    ] = 100,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask with the chat template instead of plain text.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="The context, too, reads the packed cache throughout."),
    ] = False,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens read at a time.")] = 512,
    batch: Annotated[
        int, typer.Option(min=1, help="Questions at once; fewer take less memory.")
    ] = 12,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="OUT", help="Every answer; a run goes on from there."),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Heat maps: .svg or .png.")
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Hide facts in real text and ask for them, at several lengths and depths.

    Single facts, one of many, several at once, and chains of variables; the same prompts for all
    settings, and gaps to full precision with their interval. Works with base models as well.

    Example: oscarkv eval needle MODEL --text essays.txt --artifact FILE --json needle.json
    """
    from oscarkv.evaluation.needle import REFERENCE, fresh, load_needles, measure_needles
    from oscarkv.evaluation.needle_prompts import ASKED, Haystack

    for path in filter(None, (json_file, plot_file)):
        options.require_writable(path)
    files = [*text, *(more_text or [])]
    options.require_files([*files, *(calibration_text or []), *(artifact or [])])
    wanted = gather.recipes(recipes, bool(calibration_text))
    if not artifact and not wanted:
        raise OscarError("nothing to compare: give --artifact, --recipes or both")
    options.require_backend(backend)
    asked = gather.lengths(lengths)
    found = gather.load_artifacts(artifact or [], [recipe.name for recipe in wanted])
    earlier = load_needles(json_file) if json_file is not None and json_file.exists() else None

    from oscarkv.evaluation.needle import require_context
    from oscarkv.integrations.transformers.geometry import describe
    from oscarkv.integrations.transformers.text import read_texts

    texts, calibration_texts = read_texts(files), read_texts(calibration_text or [])
    loaded, tokenizer = options.load(model, device, dtype)
    identity = describe(loaded).identity
    require_context(loaded, asked)
    for one in found.values():
        one.model.require_match(identity)
    haystack = Haystack(tokenizer, texts, chat)
    haystack.context(max(asked), 0)  # refuse too little text before calibrating
    found |= gather.fit(loaded, tokenizer, calibration_texts, wanted, tokens)
    changed = {name: gather.with_windows(one, sink, recent) for name, one in found.items()}
    described = gather.describe_settings(
        changed,
        shared=gather.describe_weights(loaded),
        packed=gather.describe_backend(backend, loaded),
    )
    record = fresh(
        identity.name,
        texts,
        asked,
        -(-trials // ASKED),
        gather.same_settings(earlier.settings if earlier else {}, described),
        chat=chat,
        strict=strict,
        chunk=chunk,
        about=gather.about(),
        earlier=earlier,
    )
    settings: dict[str, Artifact | None] = {REFERENCE: None, **changed}
    with interruptible("answers so far are", json_file), progress_bar("asking") as progress:
        measure_needles(
            loaded,
            haystack,
            settings,
            record,
            backend=backend,
            batch=batch,
            path=json_file,
            progress=progress,
        )
    if json_file is not None:
        record.save(json_file)
    if plot_file is not None:
        from oscarkv.evaluation.needle_plot import save_heat_maps

        save_heat_maps(record, plot_file)
    Console(width=max(results.width, TABLE_WIDTH)).print(table(record))


def table(record: Needles) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from oscarkv.evaluation.needle import REFERENCE

    made = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{record.model}: share of hidden facts found",
        caption="gap: points more or less than full precision on the same questions, 95 % interval",
    )
    for heading in ("length", "setting"):
        made.add_column(heading, no_wrap=True)
    kinds = [row["kind"] for row in record.summary()]
    shown = list(dict.fromkeys(kinds))
    for kind in (*shown, "trials", "gap", "better/worse"):
        made.add_column(kind, justify="right", no_wrap=True)
    rows = {(row["length"], row["setting"], row["kind"]): row for row in record.summary()}
    for length in record.lengths:
        for setting in record.settings:
            found = [rows.get((length, setting, kind)) for kind in shown]
            whole = rows.get((length, setting, "all"))
            if whole is None:
                continue
            gap = whole["gap"]
            made.add_row(
                f"{length:,}",
                setting,
                *("" if row is None else f"{row['score']:.1%}" for row in found),
                str(whole["trials"]),
                ""
                if gap is None or setting == REFERENCE
                else f"{100 * gap['difference']:+.1f} "
                f"({100 * gap['low']:+.1f} to {100 * gap['high']:+.1f})",
                "" if gap is None else f"{gap['better']}/{gap['worse']}",
            )
    return made
