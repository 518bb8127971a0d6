"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from oscarkv.artifact.files import library_version, write_atomically
from oscarkv.demo import plots
from oscarkv.demo.generation import SERVING_BYTES, Generation
from oscarkv.demo.run import SHOWN, DemoResult, Pair
from oscarkv.evaluation.compare.page import marked, style, swatch

#: Contexts the memory figure shows, besides the generations' own.
LENGTHS = (2048, 8192, 32768, 131072)


def write_report(result: DemoResult, path: str | Path) -> None:
    page = render(result)

    def write(part: Path) -> None:
        part.write_text(page, encoding="utf-8")

    write_atomically(Path(path), write)


def render(result: DemoResult) -> str:
    scores, plan = result.fidelity.recipes, result.plan
    windows = result.fidelity.windows
    recipe = result.artifacts[SHOWN].recipe
    template = Template((files("oscarkv.demo") / "template.html").read_text(encoding="utf-8"))
    return template.substitute(
        style=style(),
        model=escape(result.model),
        lead=(
            f"Four ways to keep a KV cache in 2 bits, calibrated on one book and measured on "
            f"another, on {escape(result.device)}, in {result.seconds:.0f} seconds."
        ),
        tiles=_tiles(result),
        measured=(
            f"{windows} window{'s' if windows > 1 else ''} of {result.fidelity.length} tokens; "
            "every position from 512 on reads the packed cache just as decoding does. All recipes "
            "have the same exact windows."
            + (" So little text gives a first look, not a measurement." if windows < 2 else "")
        ),
        table=_table(result),
        kl=plots.kl_bars(scores),
        bits=plots.bits_against_kl(scores),
        layers=plots.layer_errors(scores),
        memory=plots.memory_bars(_memory(result), SHOWN),
        memory_note="One sequence, exact windows in bf16. The first row was measured after "
        "generating, tables and slack included; the others are counted from the format, for a "
        "model of this shape.",
        sink=recipe.sink,
        recent=recipe.recent,
        bits_128k=f"{scores[SHOWN].bits_128k:.2f}",
        pairs="\n".join(_pair(pair) for pair in result.pairs),
        commands=escape(_commands(result)),
        footer=(
            f"oscarkv {escape(library_version())} · calibration: {plan.tokens} tokens in sequences "
            f"of {plan.length} · weights: 4-bit GGUF, dequantised; the reference is the same model "
            f"with its full-precision cache (perplexity {result.fidelity.perplexity:.2f})"
        ),
    )


def _tiles(result: DemoResult) -> str:
    score = result.fidelity.recipes[SHOWN]
    baseline = result.fidelity.recipes["paper"]
    tiles = (
        (f"{score.bits_128k:.2f} bits", "per element at 128K context, instead of 16"),
        (f"{score.top1:.1%}", "of next tokens are the ones full precision picks"),
        (
            f"{baseline.kl / score.kl:.0f}x closer",
            "in KL to full precision than the published recipe",
        ),
        (f"{score.ppl_ratio - 1:+.1%}", "change in perplexity"),
    )
    return "".join(f'<div class="tile"><b>{b}</b>{escape(text)}</div>' for b, text in tiles)


def _table(result: DemoResult) -> str:
    scores = result.fidelity.recipes
    rows = []
    for name in sorted(scores, key=lambda name: scores[name].kl):
        score = scores[name]
        state = ' <span class="collapsed">collapsed</span>' if score.collapsed else ""
        cells = (
            f"{swatch(name)}{escape(name)}{state}",
            f"{score.bits_128k:.2f}",
            f"{score.kl:.4f} ± {score.kl_se:.4f}",
            f"{score.top1:.1%}",
            f"× {score.ppl_ratio:.3f}",
            f"{score.bits_actual:.2f}",
        )
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr{' class=best' if name == SHOWN else ''}>{row}</tr>")
    headings = ("recipe", "bits at 128K", "KL", "top-1 agreement", "perplexity")
    head = "".join(f"<th>{h}</th>" for h in (*headings, f"bits at {result.fidelity.length}"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _memory(result: DemoResult) -> list[tuple[str, float, float]]:
    pair = max(result.pairs, key=lambda pair: pair.packed.cached)
    # The two runs may have stopped at different tokens.
    per_token = pair.stock.serving / pair.stock.cached
    rows = [
        (
            f"{pair.packed.cached:,} (measured)",
            per_token * pair.packed.cached,
            float(pair.packed.serving),
        )
    ]
    shape, recipe = result.geometry, result.artifacts[SHOWN].recipe
    for length in LENGTHS:
        elements = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * length
        packed = elements * recipe.bits(shape["head_dim"], length) / 8
        rows.append((f"{length // 1024}K tokens", float(SERVING_BYTES * elements), packed))
    return rows


def _pair(pair: Pair) -> str:
    left, right = marked(pair.stock.text, pair.packed.text)
    note = f" The passage had this put into it: “{pair.note}”" if pair.note else ""
    return (
        f"<article><h3>{escape(pair.title)}</h3>"
        f'<p class="soft">About 6,000 characters of the book, then: “{escape(pair.question)}”'
        f"{escape(note)} <strong>{escape(pair.verdict.capitalize())}.</strong></p>"
        f'<div class="sides">{_side("full precision", left, pair.stock)}'
        f"{_side(f'{SHOWN}, 2 bits', right, pair.packed)}</div></article>"
    )


def _side(label: str, text: str, made: Generation) -> str:
    return (
        f'<div class="side"><div class="label">{escape(label)}</div><pre>{text}</pre>'
        f'<div class="note">{made.cached:,} tokens in {made.serving / 1e6:.1f} MB, '
        f"{made.bits:.2f} bits per element</div></div>"
    )


def _commands(result: DemoResult) -> str:
    plan = result.plan
    return (
        'pip install "oscarkv[demo]"\n'
        "oscarkv demo\n\n"
        "# or step by step, on texts of your own\n"
        f"oscarkv calibrate smollm2 --text train.txt --tokens {plan.tokens} "
        f"--length {plan.length} --no-general -o smollm2.safetensors\n"
        "oscarkv inspect smollm2.safetensors\n"
        "oscarkv eval fidelity smollm2 --text eval.txt --artifact smollm2.safetensors "
        f"--length {plan.length} --windows {plan.windows}\n"
        "oscarkv generate smollm2 --artifact smollm2.safetensors --prompt-file prompt.txt --compare"
    )
