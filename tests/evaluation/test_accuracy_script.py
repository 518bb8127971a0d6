"""scripts/accuracy.py on a tiny model: sections, going on, and stopping in time."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from integrations import tiny

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEXTS = "wiki-calibration wiki botchan essays long prose code chat".split()


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, name, script)  # its dataclasses look for it there
    monkeypatch.syspath_prepend(str(SCRIPTS))  # scripts import each other
    specification.loader.exec_module(script)
    return script


def test_a_tiny_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    tiny.model("qwen2").save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    for seed, name in enumerate(TEXTS):
        (tmp_path / f"{name}.txt").write_text(tiny.text(4000, seed=seed))
    out = tmp_path / "accuracy.json"
    script = loaded("accuracy", monkeypatch)

    def run(*arguments: str) -> str:
        command = ["accuracy.py", str(model), "--plan", "tiny", "--device", "cpu", *arguments]
        command += ["--texts", str(tmp_path), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", command)
        script.main()
        return capsys.readouterr().out

    assert "out of time" in run("--budget", "0", "--sections", "ablation")
    shown = run("--sections", "ablation,split")
    assert "ablation done" in shown
    assert "split done" in shown
    saved = json.loads(out.read_text())
    assert saved["about"]["model"] == "model"
    assert len(saved["about"]["texts_sha256"]) == len(TEXTS)
    scores = saved["ablation"]["recipes"]
    assert {"UHP", "UH", "H", "none", "UHP, key target", "UHP, mean removed"} <= set(scores)
    assert scores["UHP"]["kl"] != scores["UH"]["kl"]  # groups of half a head: P does something
    assert saved["ablation"]["paired_with"] == "UHP"
    assert {part["sides"] for part in saved["split"]["parts"]} == {"keys", "values", "keys+values"}
    run("--sections", "ablation")
    assert json.loads(out.read_text())["ablation"] == saved["ablation"]
    with pytest.raises(SystemExit, match="made with plan tiny, not ci"):
        run("--plan", "ci", "--sections", "ablation")
    assert json.loads(out.read_text())["about"]["plan"] == "tiny"

    # Rows of one recipe come beside those there are, and say where they were measured.
    run("--sections", "methods", "--only", "compact,precise")
    before = json.loads(out.read_text())["methods"]["recipes"]
    assert list(before) == ["compact", "precise"]
    run("--sections", "methods", "--only", "uniform")
    after = json.loads(out.read_text())["methods"]
    assert list(after["recipes"]) == ["compact", "uniform", "precise"]
    assert {name: after["recipes"][name] for name in before} == before
    added = after["recipes"]["uniform"]
    assert added["kl_difference"] == pytest.approx(added["kl"] - before["compact"]["kl"])
    assert added["kl_difference_se"] > 0
    assert added["measured_on"]["device"]
    assert json.loads(out.read_text())["about"] == saved["about"]

    # Figures that CI holds to their bounds are looked at only where they were measured to the end.
    monkeypatch.setitem(script.PLANS, "ci", script.PLANS["tiny"])
    kept = out.read_text()
    out.write_text(kept.replace('"plan": "tiny"', '"plan": "ci"'))
    assert "ablation done" in run("--plan", "ci", "--sections", "ablation")
    assert "out of time" in run("--plan", "ci", "--sections", "methods", "--budget", "0")
    out.write_text(kept)

    # The page is written from what was measured, and nothing else of it changes.
    page = loaded("accuracy_page", monkeypatch)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    docs = tmp_path / "docs" / "accuracy.md"
    docs.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    arguments = ["accuracy_page.py", str(out), "--docs", str(tmp_path / "docs")]
    monkeypatch.setattr(sys, "argv", arguments)
    page.main()
    text = docs.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text.split()
    assert f"Of {added['measured_on']['device']}, torch" in text
    assert f"| UH | {scores['UH']['bits_128k']:.3f} | {scores['UH']['kl']:.4f}" in text
    assert (tmp_path / "docs" / "pictures" / "accuracy-layers.svg").stat().st_size > 1000


def test_what_make_accuracy_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    script = loaded("accuracy", monkeypatch)
    script.require_same({}, "tiny", "ci")
    with pytest.raises(SystemExit, match="made with model small, not tiny"):
        script.require_same({"model": "small", "plan": "ci"}, "tiny", "ci")
    good = {
        "paper": {"kl": 0.2, "bits_128k": 2.5},
        "balanced": {"kl": 0.01, "bits_128k": 2.28},
        "compact": {"kl": 0.01, "bits_128k": 2.16},
    }
    assert script.regressions(good) == []
    (line,) = script.regressions(good | {"balanced": {"kl": 0.06, "bits_128k": 2.28}})
    assert "balanced: KL 0.0600 is not a tenth of paper's 0.2000" in line
    (line,) = script.regressions(good | {"compact": {"kl": 0.01, "bits_128k": 2.21}})
    assert "compact: 2.210 bits, over 2.2" in line
    assert script.regressions(good | {"compact": {"kl": float("nan"), "bits_128k": 2.1}})
