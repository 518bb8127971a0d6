"""SGLang's overlapped scheduler: the next step is planned before the tokens of this one are known.

On a CPU the two take turns, so what is seen here is the bookkeeping: pages and windows of requests
that end while a step with them is under way. Streams are a GPU's. Retraction, aborts and random
requests with it: test_sglang_memory.py.
"""

import pytest

pytest.importorskip("sglang.srt.plugins")

from schedulers import engine
from serving_models import prompts
from test_sglang_memory import OVERLAPPED, require_clean

STRICT = {"strict": True}
LENGTHS = (5, 40, 300, 700)
PAGE = 256
#: Of the tiny model; it ends answers too.
EOS = 2


@pytest.fixture(scope="module")
def asked():
    return prompts(*LENGTHS)


@pytest.mark.parametrize("chunk", [2048, PAGE])
def test_windows_that_hold_everything_give_stock_tokens(tiny_model, asked, chunk):
    with engine(tiny_model) as started:
        stock = started.generate(asked)
        assert started.overlapped == 0
    exact = {"recent": 4096}
    with engine(tiny_model, exact, chunked_prefill_size=chunk, **OVERLAPPED) as started:
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
        assert answers[True][3] == tiny_model.oracle(asked[3:], 40)[0]


def test_answers_that_end_unforeseen(tiny_model):
    """Each is in one step more, whose page or window it may have been given: some end at the end of
    a page, some at that of a window."""
    many = prompts(*range(240, 256), *range(500, 516), seed=15)
    with engine(tiny_model, STRICT) as started:
        whole = started.generate(many, 40)
        assert started.overlapped == 0
    stops = [next(x[i] for i in range(8, 40) if x[i] not in x[:i]) for x in whole]
    with engine(tiny_model, STRICT, **OVERLAPPED) as started:
        for _ in range(2):
            names = [started.submit(p, 40, stop=s) for p, s in zip(many, stops, strict=True)]
            started.drain()
            made = [list(started.finished.pop(name).output_ids) for name in names]
            assert made == [x[: len(y)] for x, y in zip(whole, made, strict=True)]
            assert [x[-1] for x in made] == [
                stop if stop in x else EOS for x, stop in zip(made, stops, strict=True)
            ]
            require_clean(started)
    written = [len(prompt) + len(answer) - 1 for prompt, answer in zip(many, made, strict=True)]
    assert {n % 16 for n in written} >= {0, 1, 15}
    assert any(n % PAGE == 0 for n in written)
