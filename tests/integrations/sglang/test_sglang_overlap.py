"""SGLang's overlapped scheduler: the next step is planned before the tokens of this one are known.

On a CPU the two take turns, so what is seen here is the bookkeeping: pages and windows of requests
that end, are given up or retracted while a step with them is under way. Streams are a GPU's.
"""

import pytest

pytest.importorskip("sglang.srt.plugins")

from schedulers import engine
from serving_models import prompts
from test_sglang_memory import require_clean, serve_random_requests

STRICT = {"strict": True}
OVERLAP = {"disable_overlap_schedule": False}
LENGTHS = (5, 40, 300, 700)
PAGE = 256


@pytest.fixture(scope="module")
def asked():
    return prompts(*LENGTHS)


@pytest.mark.parametrize("chunk", [2048, PAGE])
def test_windows_that_hold_everything_give_stock_tokens(tiny_model, asked, chunk):
    with engine(tiny_model) as started:
        stock = started.generate(asked)
        assert started.overlapped == 0
    exact = {"recent": 4096}
    with engine(tiny_model, exact, chunked_prefill_size=chunk, **OVERLAP) as started:
        for _ in range(2):
            assert started.generate(asked) == stock
        assert started.cached == [0, 0, 256, 512]
        assert started.overlapped > 20
        require_clean(started)


@pytest.mark.parametrize("options", [STRICT, {}], ids=["strict", "plain"])
@pytest.mark.parametrize("chunk", [2048, PAGE])
def test_small_windows_give_the_tokens_without_overlap(tiny_model, asked, options, chunk):
    """Answers of 1 to 60 tokens beside each other, so that some end while others go on."""
    wanted = [60, 1, 17, 40]
    answers = {}
    for overlap in (True, False):
        knobs = {"disable_overlap_schedule": not overlap, "chunked_prefill_size": chunk}
        with engine(tiny_model, options, **knobs) as started:
            answers[overlap] = []
            for _ in range(2):  # the second finds prefixes
                names = [started.submit(p, n) for p, n in zip(asked, wanted, strict=True)]
                started.drain()
                answers[overlap] += [list(started.finished.pop(n).output_ids) for n in names]
            assert (started.overlapped > 20) == overlap
            require_clean(started)
    assert [len(answer) for answer in answers[True]] == wanted * 2
    assert answers[True] == answers[False]
    if options:
        assert answers[True][0] == tiny_model.oracle(asked[:1], 60)[0]


def test_retraction(tiny_model, monkeypatch):
    from sglang.srt.managers import scheduler

    many = prompts(*[30 + 70 * i for i in range(8)], seed=2)
    with engine(tiny_model, STRICT) as undisturbed:
        expected = undisturbed.generate(many, 60)
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 12)
    with engine(tiny_model, STRICT, **OVERLAP) as started:
        names = [started.submit(prompt, 60) for prompt in many]
        started.drain()
        requests = [started.finished[name] for name in names]
        assert [list(request.output_ids) for request in requests] == expected
        assert sum(request.retraction_count for request in requests) > 3
        require_clean(started)


def test_random_requests_leave_nothing_behind(tiny_model):
    serve_random_requests(tiny_model, 150, **OVERLAP)
