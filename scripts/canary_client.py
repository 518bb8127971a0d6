"""Pieces of a text to a server that watches itself, and what its canary says of them.

    vllm serve MODEL --attention-backend CUSTOM --additional-config \\
        '{"oscarkv": {"artifact": "FILE", "canary": {"share": 1, "interval": 1}}}'
    python scripts/canary_client.py http://localhost:8000 MODEL --text essays.txt --text code.txt

After each text the canary's metrics are printed; they are means of the last 20 requests. Requests
are some seconds apart, so that the server has time to rescore them.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from pathlib import Path


def metrics(server: str) -> list[str]:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return [line for line in lines if line.startswith("oscarkv:") and "_created" not in line]


def complete(server: str, model: str, prompt: str, new: int) -> int:
    """Asks for a completion; the number of tokens in prompt and answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return int(json.load(reply)["usage"]["total_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--requests", type=int, default=6, help="of each text")
    parser.add_argument("--start", type=int, default=1000, help="first character of the first")
    parser.add_argument("--stride", type=int, default=40000, help="characters from one to the next")
    parser.add_argument("--characters", type=int, default=8000, help="of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--pause", type=float, default=3, help="seconds between requests")
    asked = parser.parse_args()
    for path in asked.text:
        text = path.read_text(encoding="utf-8")
        lengths = []
        for index in range(asked.requests):
            start = asked.start + index * asked.stride
            piece = text[start : start + asked.characters]
            lengths.append(complete(asked.server, asked.model, piece, asked.new))
            time.sleep(asked.pause)
        print(f"{path.name}: {asked.requests} requests of {min(lengths)} to {max(lengths)} tokens")
        print("\n".join(f"  {line}" for line in metrics(asked.server)))


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a refused connection is one, too
        raise SystemExit(f"error: {error}") from None
