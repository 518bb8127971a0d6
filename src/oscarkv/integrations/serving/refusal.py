"""A refusal in any of an engine's processes ends the server with one line in the first of them.

Engines tell that process only that another one failed, after the other's traceback. So the reason
travels in a small file that both know of through the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from oscarkv.errors import OscarError

VARIABLE = "OSCARKV_REFUSAL"  # process id of the listener, colon, file


def listen() -> None:
    """Become the process that refusals of others are told to."""
    owner, path = _listener()
    if owner == os.getpid():
        path.write_text("")  # of an engine before this one
        return
    handle, name = tempfile.mkstemp(prefix="oscarkv-", suffix=".refusal")
    os.close(handle)
    os.environ[VARIABLE] = f"{os.getpid()}:{name}"
    atexit.register(_forget, os.getpid(), Path(name))


def refuse(error: OscarError) -> NoReturn:
    """Raise it, where somebody can catch it; in another process leave without a traceback."""
    owner, path = _listener()
    if not owner or owner == os.getpid():
        raise error
    path.write_text(str(error))
    raise SystemExit(1)


def heard() -> OscarError | None:
    """What another process refused."""
    owner, path = _listener()
    text = path.read_text() if owner and path.exists() else ""
    return OscarError(text) if text else None


def print_refusals_as_lines() -> None:
    """An OscarError that nobody caught is an answer to the user, not a bug."""
    plain = sys.excepthook
    if getattr(plain, "_oscarkv", False):
        return

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OscarError):
            print(f"oscarkv: {error}", file=sys.stderr)
        else:
            plain(kind, error, trace)

    excepthook._oscarkv = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def _listener() -> tuple[int, Path]:
    owner, _, name = os.environ.get(VARIABLE, "").partition(":")
    return int(owner or 0), Path(name)


def _forget(owner: int, path: Path) -> None:
    if os.getpid() == owner:  # a forked child inherits what is registered
        with contextlib.suppress(OSError):
            path.unlink()
