"""Protocols that are checked in: which tasks, how often, how answers are sampled, by model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from oscarkv.errors import OscarError
from oscarkv.evaluation.tasks.registry import get_task
from oscarkv.evaluation.tasks.requests import Sampling

_MODEL_KEYS = {"seeds", "sampling", "template", "engine", "published"}
_KEYS = {"title", "tasks", "max_new_tokens", "seeds", "chat", "models"}


@dataclass(frozen=True)
class Plan:
    """What one model is asked."""

    title: str
    tasks: tuple[str, ...]
    max_new_tokens: int
    seeds: int
    chat: bool
    sampling: Sampling
    template: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)  # arguments of vllm.LLM
    published: Mapping[str, float] = field(default_factory=dict)  # means of the tasks, in points


def load_plan(name: str, model: str) -> Plan:
    """A plan of this package, or a .toml file of one's own, for one of its models."""
    text = _text(name)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OscarError(f"plan {name} is no TOML: {error}") from None
    unknown = set(data) - _KEYS
    if unknown:
        raise OscarError(f"plan {name}: unknown {', '.join(sorted(unknown))}")
    models = _table(data.get("models", {}), f"plan {name}: models")
    key = model if model in models else _by_name(models, model)
    if key is None:
        raise OscarError(f"plan {name} has no model {model}; it has {', '.join(models) or 'none'}")
    chosen = _table(models[key], f"plan {name}, {key}")
    unknown = set(chosen) - _MODEL_KEYS
    if unknown:
        raise OscarError(f"plan {name}, {key}: unknown {', '.join(sorted(unknown))}")
    try:
        tasks = tuple(get_task(task).name for task in data["tasks"])
        return Plan(
            title=str(data["title"]),
            tasks=tasks,
            max_new_tokens=int(data["max_new_tokens"]),
            seeds=int(chosen.get("seeds", data["seeds"])),
            chat=bool(data["chat"]),
            sampling=Sampling(**chosen["sampling"]),
            **{
                part: _table(chosen.get(part, {}), f"plan {name}, {key}: {part}")
                for part in ("template", "engine", "published")
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OscarError(f"plan {name}, {key}: {error}") from None


def _table(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise OscarError(f"{what} is {found!r}, not a table")
    return found


def _by_name(models: Mapping[str, Any], model: str) -> str | None:
    """A local copy of a model is known by the last part of its name."""
    last = Path(model).name.lower()
    return next((key for key in models if key.split("/")[-1].lower() == last), None)


def _text(name: str) -> str:
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise OscarError(f"cannot read plan {name}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise OscarError(f"plan {name} is not UTF-8: {error}") from None
    known = plan_names()
    if name not in known:
        raise OscarError(f"no plan {name!r}; there are {', '.join(known)}, or name a .toml file")
    return (files(__package__) / "plans" / f"{name}.toml").read_text(encoding="utf-8")


def plan_names() -> list[str]:
    folder = files(__package__) / "plans"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name[-5:] == ".toml")
