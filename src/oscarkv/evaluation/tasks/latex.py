r"""Whether two mathematical answers say the same: \dfrac12 and 0.5, (1, 2) and (1,2), 50\% and 50.

Strings in a common form, then numbers. No algebra: x+1 and 1+x differ.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DROPPED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\$", "$", "\\%", "%",
            "^{\\circ}", "^\\circ", "\\degree", "\\displaystyle")  # fmt: skip
_SAME = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\neq": "\\ne",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\{": "{",
    "\\}": "}",
    "\\lbrace": "{",
    "\\rbrace": "}",
    "−": "-",
    "π": "\\pi",
}


def equal(found: str | None, target: str) -> bool:
    if found is None:
        return False
    a, b = normal(found), normal(target)
    if a == b:
        return True
    x, y = value(a), value(b)
    if x is not None and y is not None:
        return x == y
    left, right = _parts(a), _parts(b)
    if len(left) > 1 and len(left) == len(right) and a[0] == b[0] and a[-1] == b[-1]:
        return all(equal(p, q) for p, q in zip(left, right, strict=True))
    return False


def normal(text: str) -> str:
    text = text.strip()
    text = re.sub(r"(?<!\\)\\ ", "", text).replace(
        "{,}", ","
    )  # a space; but not a matrix's next row
    for old, new in _SAME.items():
        text = text.replace(old, new)
    for word in _DROPPED:
        text = text.replace(word, "")
    # Units and words behind a number: 12\text{ cm}. Words alone are the answer.
    unit = re.fullmatch(r"(.*?[\d}\])])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?", text)
    text = unit[1] if unit else text
    text = re.sub(r"\\(?:text|textbf|mbox|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    if re.fullmatch(r"[A-Za-z](?:\([a-z]\))?=[^=]+", text):
        text = text.split("=", 1)[1]  # x = 5
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,000; but not (1,2)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\{([^{}]*)\}(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"_\{(\w)\}", r"_\1", text)
    text = re.sub(r"\^\{(\w)\}", r"^\1", text)
    return re.sub(r"(?<![\d.])\.(\d)", r"0.\1", text)


def value(text: str) -> Fraction | None:
    """A plain number: 12, -0.5, 3/4, \\frac{3}{4}, 1\\frac{1}{2}."""
    mixed = re.fullmatch(r"(-?)(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}", text)
    try:
        if mixed:
            sign, whole, top, bottom = mixed.groups()
            found = Fraction(int(whole or 0)) + Fraction(int(top), int(bottom))
            return -found if sign else found
        if re.fullmatch(r"-?\d+(?:\.\d+)?(?:/-?\d+)?", text):
            top, _, bottom = text.partition("/")
            return Fraction(top) / Fraction(bottom or 1)
    except ZeroDivisionError:
        pass
    return None


def _parts(text: str) -> list[str]:
    """The parts of (a,b), [a,b], {a,b} or a,b at the outermost commas."""
    inside = text[1:-1] if text[:1] in "([{" and text[-1:] in ")]}" else text
    parts, depth, last = [], 0, 0
    for index, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(inside[last:index])
            last = index + 1
    return [*parts, inside[last:]]
