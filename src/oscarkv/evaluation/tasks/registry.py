"""The tasks there are, by name."""

from __future__ import annotations

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks import (
    aime25,
    gpqa,
    gsm8k,
    humaneval,
    livecodebench,
    longbench,
    math500,
    ruler,
)
from oscarkv.evaluation.tasks.task import Task

_MODULES = (gsm8k, math500, humaneval, gpqa, aime25, livecodebench, longbench, ruler)
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in _MODULES}


def get_task(name: str) -> Task:
    if name not in TASKS:
        raise OscarError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
