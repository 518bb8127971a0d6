"""The table that `oscarkv eval tasks` prints."""

from __future__ import annotations

from typing import Any

from oscarkv.evaluation.paired import interval
from oscarkv.evaluation.tasks.record import REFERENCE, TasksRecord


def table(record: TasksRecord) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{record.about['model']} on {record.about['engine']}",
        caption="Gap: points less than with the full-precision cache on the same problems, with "
        "its 95 % interval.\np: exact McNemar, or a sign-flip test for several seeds.",
    )
    for heading in ("task", "setting"):
        made.add_column(heading, no_wrap=True)
    for heading in ("problems", "score", "gap", "95 %", "better/worse", "p"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, task in record.tasks.items():
        for setting in record.settings:
            scores = task.scores(setting)
            if scores is None:
                made.add_row(name, setting, "", "not done", "", "", "", "")
                continue
            seeds = f" x{len(task.seeds)}" if len(task.seeds) > 1 else ""
            count = f"{len(scores)}{seeds}"
            score = f"{100 * sum(scores) / len(scores):.1f}"
            gap = None if setting == REFERENCE else task.gap(setting)
            if gap is None:
                low, high = interval(scores)
                made.add_row(
                    name, setting, count, score, "", f"{100 * low:.1f} to {100 * high:.1f}", "", ""
                )
                continue
            made.add_row(
                name,
                setting,
                count,
                score,
                f"{100 * gap.difference:+.1f}",
                f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}",
                f"{gap.better}/{gap.worse}",
                f"{gap.p:.3f}",
            )
    return made
