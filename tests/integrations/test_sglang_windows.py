"""The books of exact copies in the SGLang plugin, without SGLang."""

from oscarkv.integrations.serving.windows import WindowRule
from oscarkv.integrations.sglang.windows import Holding, Windows

RULE = WindowRule(sink=16, recent=32, page=64)  # four blocks a page


def request(windows: Windows, name: str, pages: list[int], blocks: list[int]) -> Holding:
    """One that holds windows of these blocks, in pages from 100 on."""
    holding = windows.requests[name] = Holding(pages=pages)
    for block in blocks:
        unit = windows.unit(pages, block)
        if unit not in windows.page_of:
            windows.attach(unit, 100 + len(windows.page_of))
        windows.hold(holding, block, unit)
    return holding


def test_blocks_that_must_be_real() -> None:
    windows = Windows(RULE)
    assert windows.real(0, 4, 64) == [0, 1, 2, 3]  # 16 tokens of slack before the window
    assert windows.real(0, 16, 256) == [0, 13, 14, 15]
    assert windows.real(8, 16, 256) == [13, 14, 15]


def test_a_request_lets_go_of_what_it_passed() -> None:
    windows = Windows(RULE)
    holding = request(windows, "a", [1, 2], [0, 1, 2, 3, 4])
    windows.let_go_before(holding, 100)  # queries from 100 on read from token 69 - 16 on
    assert sorted(holding.held) == [0, 3, 4]
    assert (windows.held, windows.idle) == (3, 2)
    assert windows.drop_left() == 101  # the oldest first
    windows.finish("a")
    assert (windows.held, windows.idle, len(windows.ends)) == (0, 4, 3)
    assert not windows.holders
    assert windows.drop_left() == 102
    assert windows.drop_left() is None
    assert windows.drop_end() == 100


def test_a_window_stays_while_another_request_holds_it() -> None:
    windows = Windows(RULE)
    request(windows, "a", [1], [0, 1])
    request(windows, "b", [1], [0])
    windows.finish("a")
    assert (windows.held, windows.idle) == (1, 1)
    windows.finish("b")
    assert (windows.held, windows.idle) == (0, 2)


def test_a_hit_needs_the_sink_and_what_comes_before_its_end() -> None:
    windows = Windows(RULE)
    request(windows, "a", [7, 3], [0, 2, 3, 6, 7])
    assert windows.ready([7, 3], 64)
    assert windows.ready([7, 3], 128)
    del windows.page_of[windows.unit([7, 3], 6)]
    assert windows.ready([7, 3], 64)
    assert not windows.ready([7, 3], 128)
    del windows.page_of[windows.unit([7, 3], 0)]
    assert not windows.ready([7, 3], 64)


def test_pages_that_give_way_hand_their_windows_over() -> None:
    windows = Windows(RULE)
    holding = request(windows, "mine", [5, 6], [0, 3, 4])
    request(windows, "theirs", [1], [0])
    windows.finish("theirs")
    before = dict(windows.page_of)
    windows.replace("mine", [5], [1])
    assert holding.pages == [1, 6]
    assert holding.held == {0: 4, 3: 7, 4: 24}
    assert windows.page_of[4] == before[4]  # theirs was there
    assert windows.page_of[7] == before[23]  # mine moved
    assert windows.held == 3
    assert windows.forget(5) == [before[20]]  # the copy that nobody needs goes with its page
    assert windows.held == len(windows.page_of) == 3
    windows.finish("mine")
    assert not windows.holders


def test_a_freed_page_takes_its_windows_along() -> None:
    windows = Windows(RULE)
    request(windows, "a", [2], [0, 1])
    windows.finish("a")
    windows.changed.clear()
    assert windows.forget(2) == [100, 101]
    assert windows.changed == {8, 9}
    assert (windows.held, windows.idle) == (0, 0)
