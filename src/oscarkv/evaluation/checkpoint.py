"""Finished work of a long measurement, on disk: an interrupted one goes on where it stopped.

A directory with one JSON object a line in `scores.jsonl`. A line that a crash cut off is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from oscarkv.errors import OscarError

FILE = "scores.jsonl"


class Checkpoint(MutableMapping[str, Any]):
    """A map from keys to JSON values that is written as it grows; without a directory, a dict."""

    def __init__(self, directory: Path | None = None) -> None:
        self._found: dict[str, Any] = {}
        self._path = None
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / FILE
            text = self._path.read_text("utf-8") if self._path.exists() else ""
        except OSError as error:
            reason = error.strerror or error
            raise OscarError(f"cannot keep finished work in {directory}: {reason}") from None
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._path.write_text(whole, "utf-8")
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                self._found[entry["key"]] = entry["value"]
            except (ValueError, KeyError, TypeError):
                raise OscarError(
                    f"{self._path} is damaged; delete it to measure everything again"
                ) from None

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __getitem__(self, key: str) -> Any:
        return self._found[key]

    def __delitem__(self, key: str) -> None:
        raise OscarError("finished work is kept; delete its directory to measure everything again")

    def __setitem__(self, key: str, value: Any) -> None:
        self._found[key] = value
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value}) + "\n")
                file.flush()
                os.fsync(file.fileno())
