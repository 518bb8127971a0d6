"""Where output goes: results to stdout, progress and messages to stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

results = Console()
errors = Console(stderr=True)

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells count

Progress = Callable[[int, int, str], None]


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar with the time left, fed with (done, total, what)."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("elapsed,"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    # A step can take half a minute: the speed must be taken over more than rich's 30 seconds.
    with progress.Progress(
        *columns, console=errors, transient=True, speed_estimate_period=1800
    ) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {what}")

        yield report


@contextmanager
def interruptible(what: str, file: Path | None) -> Iterator[None]:
    """Ctrl-C ends the command with one line: `what` is in the file."""
    try:
        yield
    except KeyboardInterrupt:
        where = "" if file is None else f"; {what} in {file}"
        errors.print(f"interrupted{where}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def warn(message: str) -> None:
    errors.print(f"warning: {message}", style="yellow", markup=False, highlight=False)


def show_log() -> None:
    """Let the package's own log messages (downloads, conversions) appear, above any bar."""
    from rich.logging import RichHandler

    logger = logging.getLogger("oscarkv")
    if not logger.handlers:
        handler = RichHandler(
            console=errors, show_time=False, show_level=False, show_path=False, highlighter=None
        )
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
