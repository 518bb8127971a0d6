"""The demo: its report on made-up figures, and the whole of it on the real model."""

import re
from pathlib import Path

import pytest
from commandline import Run

from oscarkv.artifact import load_artifact
from oscarkv.demo.generation import Generation, first_difference
from oscarkv.demo.report import write_report
from oscarkv.demo.run import FULL, PROMPTS, RECIPES, DemoResult, Pair, book, passage
from oscarkv.evaluation.compare.page import marked
from oscarkv.evaluation.fidelity import Fidelity, RecipeScore


def assert_self_contained(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "@import" not in page
    namespaces = {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r'https?://[^"<\s]*', page)) <= namespaces
    assert page.count("<svg") == 4


def test_report(artifact: Path, tmp_path: Path) -> None:
    scores = {
        name: RecipeScore(
            kl=0.01 * 5**i,
            kl_se=0.001,
            top1=0.95 - 0.2 * i,
            ppl_ratio=1.01,
            bits_128k=2.3,
            bits_actual=5.0,
            layer_errors={0: 0.1, 1: 0.2},
        )
        for i, name in enumerate(RECIPES)
    }
    made = [Generation([1], "a <b> & c", 1.0, 100, 4000, 2000, 16.0)]
    made.append(Generation([2], "a <i> & c", 1.0, 100, 900, 700, 5.6))
    pair = Pair("Title", "Why?", "", *made)
    result = DemoResult(
        model="tiny",
        geometry={"layers": 2, "kv_heads": 2, "head_dim": 16},
        artifacts={name: load_artifact(artifact) for name in RECIPES},
        fidelity=Fidelity("tiny", "", 1024, 1, True, 9.0, scores),
        pairs=[pair],
        plan=FULL,
        device="cpu",
    )
    path = tmp_path / "demo.html"
    write_report(result, path)
    page = path.read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "a <mark>&lt;i&gt;</mark> &amp; c" in page
    assert page.count('class="collapsed"') == 1
    assert "$" not in page


def test_differences() -> None:
    assert marked("same words", "same words") == ("same words", "same words")
    assert marked("one two", "one three") == ("one <mark>two</mark>", "one <mark>three</mark>")
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_prompts_are_in_the_book() -> None:
    for prompt in PROMPTS:
        content = passage(prompt, book("botchan.txt"))
        assert content.endswith(prompt.question)
        assert len(content) > 5900
        if prompt.inserted:
            # Beyond the sink and well before the recent window.
            assert 2000 < content.index(prompt.inserted) < 4500


@pytest.mark.slow
def test_demo_on_the_real_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    result = run("demo", "--quick", "-o", path)
    assert result.exit_code == 0, result.output
    page = path.read_text(encoding="utf-8")
    assert_self_contained(page)
    assert "balanced" in result.stdout
