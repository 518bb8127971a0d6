"""scripts/accuracy.py on a tiny model: sections, going on, and stopping in time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from integrations import tiny

SCRIPT = Path(__file__).parents[2] / "scripts" / "accuracy.py"
TEXTS = "wiki-calibration wiki botchan essays long prose code chat".split()


def test_a_tiny_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    tiny.model("qwen2").save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    for seed, name in enumerate(TEXTS):
        (tmp_path / f"{name}.txt").write_text(tiny.text(4000, seed=seed))
    out = tmp_path / "accuracy.json"
    specification = importlib.util.spec_from_file_location("accuracy", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "accuracy", script)  # its dataclasses look for it there
    specification.loader.exec_module(script)

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
