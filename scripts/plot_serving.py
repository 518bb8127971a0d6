"""Draw `oscarkv bench serving --json` again: python scripts/plot_serving.py JSON OUT.svg"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from oscarkv.benchmark.serving import ServingRecord
from oscarkv.benchmark.serving_report import plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    data = json.loads(arguments.json.read_text(encoding="utf-8"))
    plot(ServingRecord.from_json(data), arguments.output)


if __name__ == "__main__":
    main()
