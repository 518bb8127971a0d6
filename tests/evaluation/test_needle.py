"""Needles: prompts are what they claim to be, and sharing a context changes no answer."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.cache_utils import DynamicCache

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations"))
import tiny

from oscarkv.artifact import Artifact
from oscarkv.errors import OscarError
from oscarkv.evaluation import needle
from oscarkv.evaluation.needle_prompts import ASKED, DEPTHS, KINDS, MANY, Context, Haystack, score
from oscarkv.integrations.transformers.cache import OscarCache

LENGTH = 4096  # a token is a byte here, and a context has twenty needles


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack(tiny.tokenizer(), [tiny.text(9000)])


@pytest.fixture(scope="module")
def context(haystack: Haystack) -> Context:
    return haystack.context(LENGTH, 0)


def test_prompts_have_their_length_and_hold_their_facts(
    haystack: Haystack, context: Context
) -> None:
    text = haystack.tokenizer.decode(context.tokens)
    lengths = {len(context.tokens) + len(trial.question) for trial in context.trials}
    assert lengths == {LENGTH - 56}  # one length, and room for the longest answer
    assert {trial.kind for trial in context.trials} == set(KINDS)
    assert sum(trial.kind == "multikey" for trial in context.trials) == ASKED
    assert text.count("The password of the") == MANY
    for trial in context.trials:
        question = haystack.tokenizer.decode(trial.question)
        for target in trial.targets:
            assert target in text
            assert target not in question
            assert score(f"It is {target}.", trial.targets) == pytest.approx(1 / len(trial.targets))
    single = context.trials[0]
    assert single.depth in DEPTHS
    place = text.index(single.targets[0]) / len(text)
    assert place == pytest.approx(single.depth, abs=0.12)


def test_a_chain_of_variables_can_be_followed(haystack: Haystack, context: Context) -> None:
    text = haystack.tokenizer.decode(context.tokens)
    for trial in context.trials:
        if trial.kind == "tracking":
            first, *rest = trial.targets
            value = haystack.tokenizer.decode(trial.question).split("have the value ")[1][:5]
            assert f"VAR {first} = {value}." in text
            for before, name in zip(trial.targets, rest, strict=False):
                assert text.index(f"VAR {before} = ") < text.index(f"VAR {name} = VAR {before}.")


def test_contexts_are_the_same_each_time_and_differ_by_seed(haystack: Haystack) -> None:
    assert haystack.context(LENGTH, 3).sha256 == haystack.context(LENGTH, 3).sha256
    assert haystack.context(LENGTH, 3).sha256 != haystack.context(LENGTH, 4).sha256
    depths = [
        trial.depth
        for seed in range(100)
        for trial in haystack.context(LENGTH, seed).trials
        if trial.kind == "single"
    ]
    counts = [depths.count(depth) for depth in DEPTHS]
    assert sum(counts) == 400
    assert min(counts) > 20  # every depth is asked for


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def artifact(model: Any) -> Artifact:
    return tiny.calibrated("llama")


def one_by_one(model: Any, haystack: Haystack, context: Context, make: Any) -> list[str]:
    """Every question with a cache of its own, which reads the context again."""
    texts = []
    for trial in context.trials:
        alone = Context(context.tokens, [trial])
        texts += needle.answer(model, haystack.tokenizer, make(), alone, False, 512)
    return texts


@pytest.mark.parametrize("packed", [False, True])
def test_sharing_a_context_changes_no_answer(
    model: Any, artifact: Artifact, haystack: Haystack, packed: bool
) -> None:
    whole = haystack.context(LENGTH, 1)
    context = Context(whole.tokens[:700], whole.trials[::4])  # enough: the windows hold 12 tokens

    def make() -> Any:
        return OscarCache(model, artifact) if packed else DynamicCache(config=model.config)

    shared = needle.answer(model, haystack.tokenizer, make(), context, False, 512)
    assert len(set(shared)) > 1
    assert shared == needle.answer(model, haystack.tokenizer, make(), context, False, 512, 2)
    assert shared == one_by_one(model, haystack, context, make)


def test_exact_windows_give_the_answers_of_a_stock_cache(model: Any, haystack: Haystack) -> None:
    whole = haystack.context(LENGTH, 2)
    context = Context(whole.tokens[:300], whole.trials[::3])
    exact = OscarCache(model, tiny.calibrated("llama", windows="large"))
    stock = DynamicCache(config=model.config)
    found = [
        needle.answer(model, haystack.tokenizer, c, context, False, 64) for c in (exact, stock)
    ]
    assert found[0] == found[1]


def record(settings: dict[str, Any], earlier: Any = None) -> needle.Needles:
    return needle.fresh(
        "tiny", ["text"], [LENGTH], 1, settings, chat=False, strict=False, chunk=512, about={},
        earlier=earlier,
    )  # fmt: skip


def test_a_run_goes_on_where_it_stopped(
    model: Any, haystack: Haystack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake(_: Any, __: Any, cache: Any, context: Context, *___: Any) -> list[str]:
        calls.append(len(context.trials))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [" ".join(trial.targets) for trial in context.trials]

    monkeypatch.setattr(needle, "answer", fake)
    monkeypatch.setattr(needle, "_make_cache", lambda *_: None)
    monkeypatch.setattr(needle, "require_context", lambda *_: None)
    path = tmp_path / "needle.json"
    both = {needle.REFERENCE: None, "packed": None}
    with pytest.raises(KeyboardInterrupt):
        needle.measure_needles(model, haystack, both, record({n: {} for n in both}), path=path)
    kept = needle.load_needles(path)
    assert all(set(trial["answers"]) == {needle.REFERENCE} for trial in kept.trials)
    again = record({name: {} for name in both}, kept)
    needle.measure_needles(model, haystack, both, again, path=path)
    assert len(calls) == 3  # the reference was not asked again
    found = again.gap("packed")
    assert found is not None
    assert found.difference == 0
    assert found.items == len(again.trials)
    whole = [row for row in again.summary() if row["kind"] == "all"]
    assert [row["score"] for row in whole] == [1.0, 1.0]
    assert again.grid("packed", "single")

    again.prompts[f"{LENGTH}/0"] = "another"
    del again.trials[0]["answers"]["packed"]
    with pytest.raises(OscarError, match="other prompts"):
        needle.measure_needles(model, haystack, both, again, path=path)


def test_what_cannot_be_measured_is_refused(model: Any, haystack: Haystack) -> None:
    with pytest.raises(OscarError, match="no room for its needles"):
        haystack.context(1024, 0)
    with pytest.raises(OscarError, match="give more --text"):
        haystack.context(32768, 0)
    with pytest.raises(OscarError, match="beyond the model's context"):
        needle.require_context(model, [1 << 30])
    with pytest.raises(OscarError, match="no chat template"):
        Haystack(tiny.tokenizer(), [tiny.text(9000)], chat=True)
    other = record({})
    other.chunk = 64
    with pytest.raises(OscarError, match="another chunk"):
        record({}, other)


def test_heat_maps_are_drawn(haystack: Haystack, context: Context, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from oscarkv.evaluation.needle_plot import save_heat_maps

    made = record({needle.REFERENCE: {}, "packed": {}})
    for trial in needle._trials(made, context, LENGTH, 0):
        trial["answers"] = {
            name: {"text": "", "score": float(name == "packed")} for name in made.settings
        }
    save_heat_maps(made, tmp_path / "map.svg")
    drawn = (tmp_path / "map.svg").read_text()
    assert "<svg" in drawn
    with pytest.raises(OscarError, match=r"name an \.svg"):
        save_heat_maps(made, tmp_path / "map.txt")
