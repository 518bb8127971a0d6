"""The section `canary` of the settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from oscarkv.errors import OscarError

#: Positions beyond the windows that a request must have: fewer say little.
LEAST = 64


@dataclass(frozen=True)
class CanaryOptions:
    """One key of the section each."""

    share: float = 0.01  # of the finished requests
    max_tokens: int = 2048  # of a request; more is cut off
    interval: float = 60.0  # seconds between two rescorings, at least
    #: Where the log says so: above, below, above.
    kl: float = 0.1
    agreement: float = 0.85
    drift: float = 2.0

    @classmethod
    def of(cls, section: dict[str, Any] | None) -> CanaryOptions | None:
        """What a user wrote; None: no canary."""
        if section is None:
            return None
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(section) - set(known))
        if unknown:
            raise OscarError(
                f"unknown option {', '.join(unknown)} of oscarkv's canary; known: "
                f"{', '.join(known)}"
            )
        options = cls(**section)
        for name, low, high in (
            ("share", 0.0, 1.0),
            ("max_tokens", 2, float("inf")),
            ("interval", 0.0, float("inf")),
            ("kl", 0.0, float("inf")),
            ("agreement", 0.0, 1.0),
            ("drift", 1.0, float("inf")),
        ):
            value = getattr(options, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise OscarError(
                    f"oscarkv's canary: {name} is {value!r}, not a number from {low:g} to {high:g}"
                )
        if not isinstance(options.max_tokens, int):  # it cuts a list of tokens
            raise OscarError(
                f"oscarkv's canary: max_tokens is {options.max_tokens!r}, not a whole number"
            )
        return options
