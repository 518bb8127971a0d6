"""Rows of a data set: from local files of several kinds, or from the hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oscarkv.errors import MissingDependencyError, OscarError
from oscarkv.evaluation.tasks.task import SOURCE, Hub, Problem, Row, Task

#: Names of files that say nothing of what is in them; their folder's does.
SPLITS = ("train", "validation", "test")
KINDS = ".jsonl, .json, .csv, .jsonl.gz, .json.gz or .parquet"


def problems(task: Task, source: Path | None, limit: int | None = None) -> list[Problem]:
    """A task's problems, in the order of the data. Without a source, from the hub."""
    where = str(source) if source is not None else f"{task.hub.dataset} on the hub"
    rows = read_rows(source) if source is not None else hub_rows(task.hub)
    found: list[Problem] = []
    for index, row in enumerate(rows):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(task.read(row, index))
        except KeyError as error:
            raise OscarError(
                f"{where}: row {index + 1} has no field {error}, which {task.name} needs; it has "
                f"{', '.join(str(field) for field in row if field != SOURCE) or 'none'}"
            ) from None
        except (TypeError, ValueError) as error:
            raise OscarError(f"{where}: row {index + 1}: {error}") from None
    if not found:
        raise OscarError(f"{where} has no problems")
    seen = set()
    for problem in found:
        if problem.id in seen:
            raise OscarError(f"{where}: two problems have the id {problem.id}")
        seen.add(problem.id)
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file; a folder's files one after the other, those of its folders too."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
        if not inside:
            raise OscarError(f"{path} holds no {KINDS} files")
        for file in inside:
            yield from read_rows(file)
        return
    name = path.name.split(".")[0]
    name = path.absolute().parent.name if name in SPLITS else name
    try:
        for row in _file_rows(path):
            yield {SOURCE: name, **row}
    except OSError as error:
        raise OscarError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error, EOFError) as error:
        raise OscarError(f"{path} is damaged: {error}") from None


def _file_rows(path: Path) -> Iterator[Row]:
    kind = _kind(path)
    if kind is None:
        raise OscarError(f"{path}: rows are read from {KINDS} files")
    if kind == "parquet":
        yield from _parquet(path)
        return
    text = _text(path)
    if kind == "csv":
        yield from csv.DictReader(io.StringIO(text, newline=""))
    elif kind == "json":
        yield from _checked(json.loads(text), path, 1)
    else:
        for number, line in enumerate(text.split("\n"), 1):  # not at U+2028
            if line.strip():
                yield from _checked([json.loads(line)], path, number)


def _kind(path: Path) -> str | None:
    name = path.name.removesuffix(".gz")
    for kind in ("jsonl", "json", "csv", "parquet"):
        if name.endswith(f".{kind}"):
            return kind
    return None


def _text(path: Path) -> str:
    if path.name.endswith(".gz"):
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def _checked(rows: Any, path: Path, line: int) -> Iterator[Row]:
    if isinstance(rows, dict):  # {"data": [...]}, or one object a name
        rows = next((v for v in rows.values() if isinstance(v, list)), [rows])
    if not isinstance(rows, list):
        raise OscarError(f"{path} holds no list of objects with named fields")
    for row in rows:
        if not isinstance(row, dict):
            raise OscarError(f"{path}: line {line} is no object with named fields")
        yield row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingDependencyError(
            f'{path} is a parquet file, which needs pyarrow: pip install "oscarkv[eval]"'
        ) from None
    yield from parquet.read_table(path).to_pylist()


def hub_rows(hub: Hub) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingDependencyError(
            f'{hub.dataset} is fetched with datasets: pip install "oscarkv[eval]", or give a '
            "local copy with --data"
        ) from None
    try:
        if hub.files:
            for file in hub.files:
                url = _url(hub.dataset, file)
                yield from load_dataset("json", data_files=url, split="train", streaming=True)
            return
        rows = load_dataset(hub.dataset, hub.name, split=hub.split)
    except Exception as error:  # datasets raises whatever its parts raise
        reason = " ".join(str(error).split())[:300]
        raise OscarError(
            f"cannot load {hub.dataset} from the hub: {reason}; give a local copy with --data"
        ) from None
    yield from rows


def _url(dataset: str, file: str) -> str:
    name, _, member = file.partition("!")
    url = f"hf://datasets/{dataset}/{name}"
    return f"zip://{member}::{url}" if member else url
