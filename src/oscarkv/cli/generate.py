"""`oscarkv generate`: text from a model whose cache is packed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscarkv.cli import options
from oscarkv.cli.console import errors, results, size, warn
from oscarkv.errors import OscarError

if TYPE_CHECKING:
    from oscarkv.artifact import Artifact
    from oscarkv.demo.generation import Generation


def generate(
    model: options.ModelArgument,
    artifact: Annotated[
        Path, typer.Option(metavar="FILE", help="The model's artifact, from calibrate.")
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the full-precision cache too, side by side.")
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Send the prompt as a chat message.",
            show_default="where the model has a chat template",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "auto",
    backend: options.BackendOption = "auto",
) -> None:
    """Generate with a packed cache; with --compare, with a full-precision one as well."""
    text = _read_prompt(prompt, prompt_file)
    options.require_backend(backend)

    from oscarkv.artifact import load_artifact

    loaded_artifact = load_artifact(artifact)
    loaded, tokenizer = options.load(model, device, dtype)

    from oscarkv.demo import generation

    ids = generation.encode(tokenizer, text, chat)
    generation.require_room(loaded, ids.shape[1], max_new_tokens)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "backend": backend,
    }
    if compare:
        with errors.status("generating with the full-precision cache"):
            stock = generation.generate(loaded, tokenizer, ids, None, **settings)
        with errors.status("generating with the packed cache"):
            packed = generation.generate(loaded, tokenizer, ids, loaded_artifact, **settings)
        _print_both(stock, packed, tokenizer, loaded_artifact)
    else:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        packed = generation.generate(
            loaded, tokenizer, ids, loaded_artifact, streamer=streamer, **settings
        )
        errors.print(_memory_line(loaded_artifact.recipe.name, packed), highlight=False)
    recipe = loaded_artifact.recipe
    if not recipe.exact and packed.cached <= recipe.sink + recipe.recent:
        warn(
            f"all {packed.cached} tokens lie in the exact windows (sink {recipe.sink}, recent "
            f"{recipe.recent}), so nothing packed was read; use a longer prompt to see the codes "
            "at work"
        )


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise OscarError("give the prompt with either --prompt or --prompt-file")
    if prompt_file is not None:
        options.require_files([prompt_file])
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OscarError(f"cannot read {prompt_file}: {error}") from None
    assert prompt is not None
    if not prompt.strip():
        raise OscarError("the prompt is empty")
    return prompt


def _memory_line(name: str, made: Generation) -> str:
    return (
        f"{name}: {made.cached} tokens cached in {size(made.held)} here, {size(made.serving)} "
        f"with bf16 windows ({made.bits:.2f} bits per element); {len(made.tokens)} tokens in "
        f"{made.seconds:.1f} s"
    )


def _print_both(stock: Generation, packed: Generation, tokenizer: Any, artifact: Artifact) -> None:
    from rich.table import Table
    from rich.text import Text

    from oscarkv.demo.generation import first_difference

    table = Table(show_lines=True, expand=True)
    table.add_column("full precision", ratio=1)
    table.add_column(artifact.recipe.name, ratio=1)
    # Text, because rich would take brackets in what the model writes for markup.
    table.add_row(Text(stock.text), Text(packed.text))
    table.add_row(*(Text(_memory_line("cache", made)) for made in (stock, packed)))
    results.print(table)
    at = first_difference(stock.tokens, packed.tokens)
    if at is None:
        results.print(f"the same {len(stock.tokens)} tokens", highlight=False)
        return
    found = [
        repr(tokenizer.decode(made.tokens[at : at + 1])) if at < len(made.tokens) else "the end"
        for made in (stock, packed)
    ]
    results.print(
        f"first difference at new token {at}: {found[0]} and {found[1]}",
        highlight=False,
        markup=False,
    )
