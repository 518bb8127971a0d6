"""Plain text from a byte range of enwik8 (Wikipedia XML), for calibration and evaluation.

    python scripts/clean_enwik8.py enwik8 --start 0 --stop 2000000 -o wiki.txt

Keeps the prose of articles: no XML, tables, templates, links' targets or references.
"""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path

_REMOVE = (
    r"(?s)<!--.*?-->",
    r"(?s)<(ref|math|gallery|table|timeline)[^>]*?>.*?</\1>",
    r"<[^>]+>",
    r"(?s)\{\|.*?\|\}",
    r"\[\[[a-z\-]{2,12}:[^\]]*\]\]",
    r"\[\[(?:Image|File|Category)[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]",
    r"\[https?://[^\] ]*\]",
    r"'{2,}",
    r"(?m)^[*#:;|!].*$",
    r"(?m)^=+.*=+\s*$",
)


def clean(xml: str) -> str:
    articles = re.findall(r"(?s)<text[^>]*>(.*?)</text>", xml)
    cleaned = []
    for article in articles:
        text = html.unescape(html.unescape(article))
        if text.lower().startswith("#redirect"):
            continue
        while (shorter := re.sub(r"\{\{[^{}]*\}\}", "", text)) != text:
            text = shorter
        for pattern in _REMOVE:
            text = re.sub(pattern, "", text)
        text = re.sub(r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1", text)
        text = re.sub(r"\[https?://\S+ ([^\]]*)\]", r"\1", text)
        paragraphs = [p.strip() for p in text.split("\n") if len(p.strip()) > 80]
        if len(paragraphs) >= 3:
            cleaned.append("\n\n".join(paragraphs))
    return "\n\n".join(cleaned) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("enwik8", type=Path)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--stop", type=int, default=2_000_000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.enwik8.open("rb") as file:
        file.seek(arguments.start)
        data = file.read(arguments.stop - arguments.start)
    arguments.output.write_text(clean(data.decode("utf-8", "ignore")), encoding="utf-8")


if __name__ == "__main__":
    main()
