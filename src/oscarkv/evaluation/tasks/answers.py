"""Finding the answer in what a model wrote."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
THINKING_ENDS = "</think>"


def after_thinking(text: str) -> str:
    """What follows a reasoning trace; all of it where there is none."""
    return text.rpartition(THINKING_ENDS)[2]


def number(text: str) -> str | None:
    """One number in a common form: no commas, no currency, no zeros after a decimal point."""
    plain = text.strip().replace(",", "").replace("$", "").rstrip(".%")
    if not re.fullmatch(r"-?\d*\.?\d+", plain):
        return None
    sign, plain = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    whole, _, part = plain.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return value if value == "0" else sign + value


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def marked_number(text: str, mark: str = "####") -> str | None:
    """The number after the first mark: later ones belong to text that was made up behind it."""
    _, found, rest = text.partition(mark)
    match = _NUMBER.match(rest.strip()) if found else None
    return number(match[0]) if match else None


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, braces matched."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("x", 1)[1].lstrip()  # behind \boxed or \fbox
    rest = rest.removeprefix("ed").lstrip() if rest.startswith("ed") else rest
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index].strip()
    return None


def choice(text: str, letters: str = "ABCD") -> str | None:
    """The letter that a text settles on: boxed, or behind "answer is" or "Answer:", whichever comes
    last; without those, a last line that is nothing but a letter."""
    around = r"(?:[\s*_$\[({]|\\[(\[]|\\(?:boxed|text(?:bf)?|math(?:rm|bf))\s*\{)*"
    pattern = rf"(?i:answer)[\s*_]*(?:is|:)[\s*:]*(?:option\b)?{around}([{letters}])(?![\w'-])"
    found = [(match.start(), match[1]) for match in re.finditer(pattern, text)]
    alone = re.fullmatch(rf"{around}([{letters}])(?:[)\]}}*$.:].*)?", boxed(text) or "", re.DOTALL)
    if alone:
        found.append((text.rfind("\\boxed"), alone[1]))
    if found:
        return max(found)[1]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = re.fullmatch(rf"[\s*(]*([{letters}])[\s*).]*", lines[-1]) if lines else None
    return last[1] if last else None


def code_blocks(text: str) -> list[str]:
    """The fenced blocks of code, those of another language than Python left out."""
    found = re.findall(r"```([^\n`]*)\n(.*?)```", text.replace("\r\n", "\n"), re.DOTALL)
    return [block for language, block in found if language.strip().lower()[:2] in ("", "py")]
