"""What is kept of a run: every answer, so that it can be resumed, compared and looked at again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oscarkv.artifact.files import write_atomically
from oscarkv.errors import OscarError
from oscarkv.evaluation.paired import Gap, gap

FORMAT = "oscarkv-tasks-1"
#: The setting that others are compared with.
REFERENCE = "full precision"

#: One answer: text, answer, score, tokens, finish.
Entry = dict[str, Any]


@dataclass
class TaskRecord:
    """One task: its problems, and the answers of every setting by seed and problem."""

    about: dict[str, Any]  # shots, chat, data, sampling, max_new_tokens
    problems: list[dict[str, Any]]  # id, group, target, prompt_tokens
    prompts_sha256: str
    seeds: list[int]
    answers: dict[str, dict[str, dict[str, Entry]]] = field(default_factory=dict)

    def entries(self, setting: str, seed: int) -> dict[str, Entry]:
        return self.answers.setdefault(setting, {}).setdefault(str(seed), {})

    def scores(self, setting: str) -> list[float] | None:
        """A problem's mean over seeds each, in order; None while answers are missing."""
        by_seed = [self.answers.get(setting, {}).get(str(seed), {}) for seed in self.seeds]
        ids = [problem["id"] for problem in self.problems]
        if not by_seed or any(not entries.keys() >= set(ids) for entries in by_seed):
            return None
        return [sum(entries[one]["score"] for entries in by_seed) / len(by_seed) for one in ids]

    def by_seed(self, setting: str) -> list[float]:
        """The mean score of each seed."""
        means = []
        for seed in self.seeds:
            entries = self.answers[setting][str(seed)]
            means.append(sum(entry["score"] for entry in entries.values()) / len(entries))
        return means

    def gap(self, setting: str) -> Gap | None:
        mine, reference = self.scores(setting), self.scores(REFERENCE)
        return None if mine is None or reference is None else gap(reference, mine)

    def cut_short(self, setting: str) -> int:
        """Answers that ran into the limit of new tokens."""
        rows = self.answers.get(setting, {}).values()
        return sum(entry["finish"] == "length" for row in rows for entry in row.values())


@dataclass
class TasksRecord:
    """Everything that is saved."""

    about: dict[str, Any]  # model, engine, command, date, device, versions
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, TaskRecord] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        tasks = {}
        for name, task in self.tasks.items():
            results = {}
            for setting in task.answers:
                found, scores = task.gap(setting), task.scores(setting)
                results[setting] = {
                    "score": None if scores is None else sum(scores) / len(scores),
                    "by_seed": None if scores is None else task.by_seed(setting),
                    "cut_short": task.cut_short(setting),
                    "gap": None if found is None or setting == REFERENCE else asdict(found),
                }
            tasks[name] = {**asdict(task), "results": results}
        return {"format": FORMAT, **self.about, "settings": self.settings, "tasks": tasks}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TasksRecord:
        known = ("format", "settings", "tasks")
        about = {name: value for name, value in data.items() if name not in known}
        tasks = {}
        for name, task in data["tasks"].items():
            kept = {key: value for key, value in task.items() if key != "results"}
            tasks[name] = TaskRecord(**kept)
        return cls(about, dict(data["settings"]), tasks)

    def save(self, path: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

        def write(part: Path) -> None:
            part.write_text(text, encoding="utf-8")

        write_atomically(path, write)


def load_record(path: Path) -> TasksRecord:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise OscarError(
                f"{path} is no record of tasks ({data.get('format', 'no format')!r}, not "
                f"{FORMAT!r})"
            )
        return TasksRecord.from_json(data)
    except OSError as error:
        raise OscarError(f"cannot read {path}: {error.strerror or error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OscarError(f"{path} is damaged: {error}") from None


def prompts_sha256(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()
