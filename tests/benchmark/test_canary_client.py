"""scripts/canary_client.py against a server that only counts."""

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "canary_client.py"


class Answers(BaseHTTPRequestHandler):
    prompts: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(asked["prompt"])
        assert asked["max_tokens"] == 5
        self._say(json.dumps({"usage": {"total_tokens": len(asked["prompt"]) + 5}}))

    def do_GET(self) -> None:
        self._say(
            f"vllm:other 1\noscarkv:canary_requests_total {len(self.prompts)}\n"
            "oscarkv:canary_requests_created 3\n"
        )

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_pieces_are_sent_and_the_canarys_metrics_printed(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "essay.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz")
    sizes = "--requests 3 --start 1 --stride 4 --characters 6 --new 5 --pause 0".split()
    words = ["canary_client", server, "model", "--text", str(text), *sizes]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(Answers, "prompts", [])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert Answers.prompts == ["bcdefg", "fghijk", "jklmno"]
    assert capsys.readouterr().out.splitlines() == [
        "essay.txt: 3 requests of 11 to 11 tokens",
        "  oscarkv:canary_requests_total 3",
    ]
