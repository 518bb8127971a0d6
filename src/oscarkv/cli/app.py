"""The commands put together, and what becomes of their errors."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from oscarkv import __version__
from oscarkv.cli import (
    bench,
    calibrate,
    compare,
    demo,
    doctor,
    evaluate,
    generate,
    inspect,
    needle,
    sglang,
    tasks,
    tune,
    vllm,
    zoo,
)
from oscarkv.cli.console import INTERRUPTED, errors
from oscarkv.errors import OscarError

USAGE_ERROR = 2


class _Commands(TyperGroup):
    """Errors that a user can act on become one line; anything else is a bug, with its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OscarError as error:
            errors.print(f"error: {_one_line(error)}", **_PLAIN)
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            errors.print("interrupted; nothing was written", **_PLAIN)
            raise typer.Exit(INTERRUPTED) from None


#: Messages hold paths and brackets, which rich would take for markup, and break at 80 columns.
_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def _one_line(error: OscarError) -> str:
    return " ".join(str(error).split())


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="2-bit KV caches for LLM serving: calibrate a model, look at the result, use it, "
    "and measure what it costs.",
)
app.command("calibrate")(calibrate.calibrate)
app.command("inspect")(inspect.inspect)
app.command("generate")(generate.generate)
app.command("tune")(tune.tune)
evaluate.app.command("needle")(needle.needle)
evaluate.app.command("tasks")(tasks.tasks)
app.add_typer(evaluate.app, name="eval")
app.command("compare")(compare.compare)
app.add_typer(bench.app, name="bench")
app.add_typer(vllm.app, name="vllm")
app.add_typer(sglang.app, name="sglang")
app.add_typer(zoo.app, name="zoo")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oscarkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
