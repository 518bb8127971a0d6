"""The page of comparisons: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from oscarkv.artifact.files import library_version, write_atomically
from oscarkv.evaluation.compare import plots
from oscarkv.evaluation.compare.examples import Example, moved, worst
from oscarkv.evaluation.compare.page import marked, style, swatch
from oscarkv.evaluation.compare.sources import Comparison
from oscarkv.evaluation.needle import REFERENCE
from oscarkv.evaluation.needle_plot import KINDS, TITLES, short
from oscarkv.evaluation.paired import Gap

#: Below this agreement with full precision, text is no longer text.
COLLAPSED = 0.5
#: An example's text is shown up to here, from where the two first differ.
SHOWN_CHARACTERS = 700


def write_report(comparison: Comparison, path: Path) -> None:
    page = render(comparison)

    def write(part: Path) -> None:
        part.write_text(page, encoding="utf-8")

    write_atomically(path, write)


def render(comparison: Comparison) -> str:
    template = Template((files(__package__) / "template.html").read_text(encoding="utf-8"))
    sections = [
        _summary(comparison),
        _two(
            _pareto(comparison),
            _lengths(comparison),
            _lost(comparison, "tasks"),
            _lost(comparison, "needles"),
        ),
        _tasks(comparison),
        _needles(comparison),
        _positions(comparison),
        _layers(comparison),
        _examples(comparison),
        _sources(comparison),
    ]
    return template.substitute(
        style=style(),
        model=escape(comparison.model),
        lead=escape(_lead(comparison)),
        tiles=_tiles(comparison),
        sections="\n".join(filter(None, sections)),
        footer=f"oscarkv {escape(library_version())}",
    )


def _lead(comparison: Comparison) -> str:
    what = []
    if comparison.main is not None:
        main = comparison.main
        what.append(f"{main['windows']} windows of {main['length']:,} tokens")
    if comparison.needles is not None:
        what.append(f"{len(comparison.needles.trials):,} needles")
    count = sum(len(task.problems) for _, task, _ in comparison.task_records())
    if count:
        what.append(f"{count:,} problems")
    others = [name for name in comparison.models if name != comparison.model]
    note = f" Records name the model {', '.join(others)}." if others else ""
    return f"{len(comparison.names)} recipes on the same {', '.join(what)}.{note}"


def _shown(comparison: Comparison) -> str | None:
    """The recipe the page is about: the default where it was measured, else the best one."""
    names = [name for name in comparison.names if name != "bf16"]
    return "balanced" if "balanced" in names else next(iter(names), None)


def _tiles(comparison: Comparison) -> str:
    name = _shown(comparison)
    if name is None:
        return ""
    tiles = []
    bits, score = comparison.bits(name), comparison.scores.get(name, {})
    if bits is not None:
        tiles.append((f"{bits:.2f} bits", f"per element at 128K context with {name}"))
    if score.get("top1") is not None:
        tiles.append((f"{score['top1']:.1%}", "of next tokens are those of full precision"))
    needle = None if comparison.needles is None else comparison.needles.gap(name)
    if needle is not None:
        tiles.append((_points(needle.difference), "points in finding needles, all lengths"))
    gaps = [g for _, task, _ in comparison.task_records() if (g := task.gap(name)) is not None]
    if gaps:
        mean = sum(g.difference for g in gaps) / len(gaps)
        what = f"points over {len(gaps)} task{'s' if len(gaps) > 1 else ''}, against full precision"
        tiles.append((_points(mean), what))
    return "".join(f'<div class="tile"><b>{b}</b>{escape(text)}</div>' for b, text in tiles)


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("+0.0", "±0.0").replace("-0.0", "±0.0")


def _section(title: str, text: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="soft">{text}</p>{body}</section>'


def _two(*sections: str) -> str:
    found = [section for section in sections if section]
    return f'<div class="two">{"".join(found)}</div>' if len(found) > 1 else "".join(found)


def _table(headings: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Rows with a class each."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr{f' class={kind}' if kind else ''}>{''.join(f'<td>{x}</td>' for x in row)}</tr>"
        for kind, row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


# -- the sections ----------------------------------------------------------------------------------


def _summary(comparison: Comparison) -> str:
    tasks, needles, scores = comparison.task_records(), comparison.needles, comparison.scores
    headings = ["recipe", "bits at 128K"]
    headings += ["KL", "top-1", "perplexity"] if scores else []
    headings += ["needles"] if needles is not None else []
    headings += [title for title, _, _ in tasks]
    rows = []
    if needles is not None or tasks:
        rows.append(("", _reference_row(comparison)))
    for name in comparison.names:
        score, bits = scores.get(name, {}), comparison.bits(name)
        top1 = score.get("top1")
        state = ' <span class="collapsed">collapsed</span>' if _collapsed(top1) else ""
        simulated = ' <span class="note">simulated</span>' if score.get("simulated") else ""
        row = [f"{swatch(name)}{escape(name)}{state}{simulated}", _figure(bits, ".2f")]
        if scores:
            row.append(f"{_figure(score.get('kl'), '.4f')}{_spread(score.get('kl_se'))}")
            row.append(_figure(top1, ".1%"))
            ratio = score.get("ppl_ratio")
            row.append("" if ratio is None else f"× {ratio:.3f}")
        if needles is not None:
            row.append(_gap_cell(needles.gap(name)))
        row += [_gap_cell(task.gap(name)) for _, task, _ in tasks]
        rows.append(("best" if name == _shown(comparison) else "", row))
    text = (
        "Lower KL is better; scores are in per cent, with the gap to full precision on the same "
        "questions and its 95 % interval. All bits include scales and exact windows."
    )
    return _section("What each recipe costs", text, _table(headings, rows))


def _reference_row(comparison: Comparison) -> list[str]:
    row = [f"{swatch(REFERENCE)}{REFERENCE}", "16"]
    row += ["", "", ""] if comparison.scores else []
    if comparison.needles is not None:
        found = comparison.needles.gap(REFERENCE)
        row.append("" if found is None else f"{100 * found.score:.1f}")
    for _, task, _ in comparison.task_records():
        scores = task.scores(REFERENCE)
        row.append("" if scores is None else f"{100 * sum(scores) / len(scores):.1f}")
    return row


def _collapsed(top1: float | None) -> bool:
    return top1 is not None and top1 < COLLAPSED


def _figure(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _spread(value: float | None) -> str:
    return "" if value is None else f" ± {value:.4f}"


def _gap_cell(gap: Gap | None) -> str:
    if gap is None:
        return ""
    sure = "" if gap.within_noise else ' class="sure"'
    return (
        f"{100 * gap.score:.1f} <span{sure}>({_points(gap.difference)})</span>"
        f'<br><span class="note">{100 * gap.low:+.1f} to {100 * gap.high:+.1f}</span>'
    )


def _pareto(comparison: Comparison) -> str:
    points = {
        name: (bits, score["kl"])
        for name, score in comparison.scores.items()
        if score.get("kl") and (bits := comparison.bits(name)) is not None and bits < 15
    }
    if len(points) < 2:
        return ""
    drawn = plots.pareto(points, label="KL (log scale)", log=True, salt="pareto")
    body = f'<div class="scroll small">{drawn}</div>'
    return _section("Bits and accuracy", "Lower left is better; nothing beats the line.", body)


def _lost(comparison: Comparison, what: str) -> str:
    """Bits against the points that tasks, or needles, lose to full precision."""
    points = {}
    for name in comparison.names:
        if what == "tasks":
            gaps = [task.gap(name) for _, task, _ in comparison.task_records()]
        else:
            gaps = [] if comparison.needles is None else [comparison.needles.gap(name)]
        known, bits = [gap for gap in gaps if gap is not None], comparison.bits(name)
        if known and len(known) == len(gaps) and bits is not None:
            points[name] = (bits, -100 * sum(gap.difference for gap in known) / len(known))
    if len(points) < 2:
        return ""
    drawn = plots.pareto(points, label="points lost", log=False, salt=f"lost-{what}")
    body = f'<div class="scroll small">{drawn}</div>'
    text = (
        "Points less than full precision on the same questions, the mean of all; lower is better."
    )
    return _section(f"Bits and {what}", text, body)


def _lengths(comparison: Comparison) -> str:
    if len(comparison.fidelity) < 2:
        return ""
    drawn = plots.by_length(comparison.fidelity)
    body = f'<div class="scroll small">{drawn}</div>'
    return _section("KL by context length", "Lower is better.", body) if drawn else ""


def _positions(comparison: Comparison) -> str:
    if comparison.main is None:
        return ""
    recipes = {
        name: score
        for name, score in comparison.main["recipes"].items()
        if score.get("kl_by_position") and not _collapsed(score.get("top1"))
    }
    if not recipes:
        return ""
    text = "Mean KL of the queries at each stretch of a window; the band is its standard error."
    body = f'<div class="scroll">{plots.by_position(recipes)}</div>'
    return _section("KL by position", text, body)


def _layers(comparison: Comparison) -> str:
    made = []
    scores = comparison.scores
    ordered = {name: scores[name] for name in comparison.names if name in scores}
    ordered.pop("bf16", None)
    bars = plots.layer_bars(ordered)
    if bars:
        text = (
            "Relative error of each layer's attention output, on the same inputs. Lower is better."
        )
        made.append(_section("Layer by layer", text, f'<div class="scroll">{bars}</div>'))
    for name, found in comparison.sensitivity.items():
        parts = [part for part in found.get("parts", []) if part.get("layer") is not None]
        if parts:
            text = "KL with the keys, or the values, of one layer rounded and all else exact."
            body = f'<div class="scroll">{plots.sensitivity_bars(parts)}</div>'
            made.append(_section(f"Where {name} errs", text, body))
    return "\n".join(made)


def _tasks(comparison: Comparison) -> str:
    rows = [
        (title, name, gap)
        for title, task, _ in comparison.task_records()
        for name in comparison.names
        if (gap := task.gap(name)) is not None
    ]
    if not rows:
        return ""
    details = []
    for title, task, record in comparison.task_records():
        about = task.about
        seeds = f", {len(task.seeds)} seeds" if len(task.seeds) > 1 else ""
        details.append(
            f"{escape(title)}: {len(task.problems)} problems{seeds} on "
            f"{escape(str(record.about.get('engine', '')))}, {about.get('shots') or 0} worked "
            f"examples"
        )
    text = f"The same prompts for all. {'; '.join(details)}."
    body = f'<div class="scroll">{plots.forest(rows)}</div>'
    counted = [
        (
            "",
            [
                f"{swatch(name)}{escape(title)} · {escape(name)}",
                f"{100 * gap.reference:.1f}",
                f"{100 * gap.score:.1f}",
                f"{gap.better} / {gap.worse}",
                "&lt; 0.001" if gap.p < 0.001 else f"{gap.p:.3f}",
            ],
        )
        for title, name, gap in rows
    ]
    headings = ("task and recipe", "full precision", "score", "better / worse", "p")
    return _section("Tasks: the gap to full precision", text, body + _table(headings, counted))


def _needles(comparison: Comparison) -> str:
    needles = comparison.needles
    if needles is None:
        return ""
    settings = [name for name in needles.settings if any(needles.grid(name, k) for k in KINDS)]
    maps = "".join(
        f'<div class="map"><h3>{swatch(name)}{escape(name)}</h3>'
        + "".join(_heat_map(comparison, name, kind) for kind in KINDS)
        + "</div>"
        for name in settings
    )
    rows = []
    for row in needles.summary():
        gap = row["gap"]
        cell = "" if gap is None else _gap_cell(Gap(**gap))
        rows.append(
            (
                "",
                [
                    f"{swatch(row['setting'])}{escape(row['setting'])}",
                    short(row["length"]),
                    escape(row["kind"]),
                    str(row["trials"]),
                    f"{100 * row['score']:.1f}" if gap is None else cell,
                ],
            )
        )
    table = _table(("setting", "context", "kind", "trials", "found, %"), rows)
    text = (
        "Facts hidden in real text: the share found in per cent, by how deep they lay and how long "
        "the text was. Several values at once and chains of variables are in the table."
    )
    details = f"<details><summary>All kinds and lengths</summary>{table}</details>"
    return _section("Needles", text, f'<div class="maps">{maps}</div>{details}')


def _heat_map(comparison: Comparison, name: str, kind: str) -> str:
    needles = comparison.needles
    assert needles is not None
    cells = needles.grid(name, kind)
    if not cells:
        return ""
    depths = sorted({depth for _, depth in cells})
    head = "".join(f"<th>{short(length)}</th>" for length in needles.lengths)
    body = ""
    for depth in depths:
        row = "".join(_cell(cells.get((length, depth))) for length in needles.lengths)
        body += f"<tr><th>{depth:.0%}</th>{row}</tr>"
    return (
        f'<table class="heat"><caption>{TITLES[kind]}</caption><thead><tr><th></th>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table>"
    )


def _cell(found: tuple[float, int] | None) -> str:
    if found is None:
        return "<td></td>"
    share, trials = found
    return f'<td style="--hue:{120 * share:.0f}" title="{trials} trials">{100 * share:.0f}</td>'


def _examples(comparison: Comparison) -> str:
    shown = [name for name in comparison.names if name != "bf16"]
    articles, notes = [], []
    for name in shown:
        lost, gained = moved(comparison, name)
        if lost or gained:
            notes.append(f"{escape(name)}: {lost} worse, {gained} better")
    best = _shown(comparison)
    for name in dict.fromkeys([*([best] if best else []), *shown]):
        found = worst(comparison, name, 4 if name == best else 1)
        articles += [_example(example) for example in found]
    if not articles:
        return ""
    text = (
        "Answers that full precision had right and a recipe did not, the clearest losses first; "
        f"words that differ are marked. Of all answers, {'; '.join(notes)}."
    )
    return _section("Worst examples", text, "".join(articles))


def _example(example: Example) -> str:
    exact, packed = _cut(example.exact, example.packed)
    left, right = marked(exact, packed)
    return (
        f"<article><h3>{escape(example.where)}</h3>"
        f'<p class="soft">Wanted: {escape(example.wanted[:200])}</p><div class="sides">'
        f'<div class="side"><div class="label">full precision</div><pre>{left}</pre></div>'
        f'<div class="side"><div class="label">{escape(example.recipe)}</div>'
        f"<pre>{right or '(nothing)'}</pre></div></div></article>"
    )


def _cut(a: str, b: str) -> tuple[str, str]:
    """Long texts from shortly before they part."""
    if max(len(a), len(b)) <= SHOWN_CHARACTERS:
        return a, b
    part = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, part - 150)
    head = "… " if start else ""

    def cut(text: str) -> str:
        tail = " …" if len(text) > start + SHOWN_CHARACTERS else ""
        return f"{head}{text[start : start + SHOWN_CHARACTERS]}{tail}"

    return cut(a), cut(b)


def _sources(comparison: Comparison) -> str:
    rows: list[tuple[str, list[Any]]] = []
    for source in comparison.sources:
        command = source["command"]
        shown = "" if not command else f"<code>{escape(command)}</code>"
        cells = (source["file"], source["what"], source["model"], source["device"] or "")
        rows.append(("", [*(escape(str(cell)) for cell in cells), shown]))
    headings = ("file", "what", "model", "measured on", "command")
    return _section("Where the figures are from", "One row a record.", _table(headings, rows))
