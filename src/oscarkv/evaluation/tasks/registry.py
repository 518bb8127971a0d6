"""The tasks there are, by name."""

from __future__ import annotations

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks import gsm8k
from oscarkv.evaluation.tasks.task import Task

TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in (gsm8k,)}


def get_task(name: str) -> Task:
    if name not in TASKS:
        raise OscarError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
