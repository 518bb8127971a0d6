"""Records of one model, read from JSON and put together by the names of their recipes.

Fidelity is read as plain data: what a record does not have is left out of the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.evaluation.needle import FORMAT as NEEDLES
from oscarkv.evaluation.needle import REFERENCE, Needles, load_needles
from oscarkv.evaluation.tasks.record import FORMAT as TASKS
from oscarkv.evaluation.tasks.record import TaskRecord, TasksRecord, load_record

FIDELITY = "oscarkv-fidelity-1"
#: What figures of one length must share to stand side by side, and what messages call it.
MEASURED_ON = {
    "model": "model",
    "text_sha256": "text",
    "windows": "number of windows",
    "strict": "--strict",
}


@dataclass
class Comparison:
    """All that is known of a model's recipes."""

    model: str
    fidelity: list[dict[str, Any]] = field(default_factory=list)  # one a length, shortest first
    needles: Needles | None = None
    tasks: list[TasksRecord] = field(default_factory=list)
    sensitivity: dict[str, Any] = field(default_factory=dict)  # by recipe
    sources: list[dict[str, Any]] = field(
        default_factory=list
    )  # file, kind, model, command, device

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """Fidelity by recipe, at the length the most recipes were measured at."""
        if not self.fidelity:
            return {}
        return max(self.fidelity, key=lambda one: len(one["recipes"]))["recipes"]

    @property
    def main(self) -> dict[str, Any] | None:
        if not self.fidelity:
            return None
        return max(self.fidelity, key=lambda one: len(one["recipes"]))

    @property
    def names(self) -> list[str]:
        """Recipes, those of fidelity first and by their KL; full precision is not among them."""
        by_kl = sorted(self.scores, key=lambda name: _number(self.scores[name].get("kl")))
        rest = [name for record in self.tasks for name in record.settings]
        rest += list(self.needles.settings) if self.needles is not None else []
        return [name for name in dict.fromkeys([*by_kl, *rest]) if name != REFERENCE]

    def bits(self, name: str) -> float | None:
        """Bits an element at 128K, from whichever record has it."""
        places: list[Mapping[str, Any]] = [self.scores]
        places += [self.needles.settings] if self.needles is not None else []
        places += [record.settings for record in self.tasks]
        for place in places:
            found = place.get(name, {}).get("bits_128k")
            if found is not None:
                return float(found)
        return None

    def task_records(self) -> list[tuple[str, TaskRecord, TasksRecord]]:
        """(title, task, the record it is in)."""
        found = []
        for record in self.tasks:
            for name, task in record.tasks.items():
                title = str(task.about.get("title", name))
                many = sum(name in other.tasks for other in self.tasks) > 1
                found.append(
                    (f"{title} ({record.about['engine']})" if many else title, task, record)
                )
        return found

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(source["model"] for source in self.sources))


def _number(value: Any) -> float:
    return float("inf") if value is None else float(value)


def read_sources(model: str, paths: Sequence[Path]) -> Comparison:
    made = Comparison(model)
    for path in paths:
        _take(made, path)
    made.fidelity.sort(key=lambda one: one["length"])
    if not made.sources:
        raise OscarError("there is nothing to compare: no records were given")
    return made


def _take(made: Comparison, path: Path) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data.get("format") if isinstance(data, dict) else None
    except OSError as error:
        raise OscarError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OscarError(f"{path} is no JSON: {error}") from None
    about: Mapping[str, Any] = data if isinstance(data, dict) else {}
    if kind == FIDELITY:
        _take_fidelity(made, data, path)
        what = "fidelity"
    elif kind == NEEDLES:
        if made.needles is not None:
            raise OscarError(f"{path} is a second record of needles; a page shows one")
        made.needles = load_needles(path)
        what, about = "needles", made.needles.about | {"model": made.needles.model}
    elif kind == TASKS:
        made.tasks.append(load_record(path))
        what = "tasks"
    else:
        raise OscarError(
            f"{path} is no record of fidelity, needles or tasks (its format is {kind!r})"
        )
    made.sources.append(
        {
            "file": path.name,
            "what": what,
            "model": str(about.get("model", "unknown")),
            "command": about.get("command"),
            "device": about.get("device"),
        }
    )


def _take_fidelity(made: Comparison, data: dict[str, Any], path: Path) -> None:
    """Records of one length are merged: they may hold different recipes, but of one model on the
    same windows."""
    try:
        records = [data, *(data.get("longer") or [])]
        found = [(int(one["length"]), dict(one["recipes"]), one) for one in records]
        sensitivity = dict(data.get("sensitivity") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OscarError(f"{path} is damaged: {error}") from None
    for length, recipes, one in found:
        for name, score in recipes.items():
            if not isinstance(score, dict):
                raise OscarError(f"{path} is damaged: recipe {name} is {score!r}, not an object")
        same = next((old for old in made.fidelity if old["length"] == length), None)
        if same is None:
            made.fidelity.append({**one, "recipes": recipes, "file": path})
        elif same["file"] != path:  # a file may have one length twice; the first of them counts
            _require_same_windows(same, one, path)
            same["recipes"] = recipes | same["recipes"]
    made.sensitivity |= sensitivity


def _require_same_windows(one: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """What an older record does not say is not compared."""
    differing = [
        f"{what} ({_short(one[key])} and {_short(other[key])})"
        for key, what in MEASURED_ON.items()
        if key in one and key in other and one[key] != other[key]
    ]
    if differing:
        raise OscarError(
            f"{one['file']} and {path} were not measured on the same windows of "
            f"{one['length']} tokens: they differ in {', '.join(differing)}; a page shows one"
        )


def _short(value: Any) -> str:
    return str(value)[:16]  # hashes are long
