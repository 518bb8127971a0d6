"""Finding answers in texts, and comparing mathematical ones."""

import pytest

from oscarkv.evaluation.tasks import answers, latex


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### $1,234.50", "1234.5"),
        ("#### -12\n\n#### 13", "-12"),
        ("####  18 eggs", "18"),
        ("the answer is 18", None),
        ("#### none", None),
        ("#### 0.50", "0.5"),
    ],
)
def test_marked_number(text: str, found: str | None) -> None:
    assert answers.marked_number(text) == found


def test_last_number_and_thinking() -> None:
    assert answers.last_number("first 3, then $2,000.") == "2000"
    assert answers.last_number("nothing") is None
    assert answers.after_thinking("<think>it is 5</think> it is 6") == " it is 6"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right\}} done", r"\left\{ 1, 2 \right\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed 5 $", "5"),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert answers.boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: B", "B"),
        ("I first thought the answer is A. But the answer is (C).", "C"),
        ("**Answer:** D", "D"),
        (r"so \boxed{B}", "B"),
        (r"\boxed{\text{C}}", "C"),
        ("Reasons.\n\nA", "A"),
        ("A is wrong, and so is B", None),
        ("Answer: E", None),
        (r"\boxed{Answer: B}", "B"),
        (r"Benzene is \boxed{C_6H_6}. Answer: A", "A"),
        (r"\boxed{D-glucose}. Answer: B", "B"),
        (r"The answer is A. No: \boxed{\mathrm{B}}", "B"),
        (r"\boxed{B. They meet}", "B"),
        ("**Answer**: B", "B"),
        ("Answer: $B$", "B"),
        (r"Answer: \(B\)", "B"),
        ("Answer: [B]", "B"),
        ("The correct answer is option B.", "B"),
        ("The answer is a mixture.", None),
        ("Answer: D-glucose", None),
    ],
)
def test_choice(text: str, found: str | None) -> None:
    assert answers.choice(text) == found


def test_code_blocks() -> None:
    text = "```python3\r\na = 1\r\n```\nIt prints:\n```text\n1\n```\nand\n```\nb = 2\n```"
    assert answers.code_blocks(text) == ["a = 1\n", "b = 2\n"]
    assert answers.code_blocks("```python\nnever closed") == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\dfrac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        (r"-\frac{3}{4}", "-0.75"),
        ("1,000", "1000"),
        ("(1, 2)", "(1,2)"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"50\%", "50"),
        (r"12\text{ cm}^2", "12"),
        (r"\text{Evelyn}", "Evelyn"),
        ("x = 5", "5"),
        (r"90^\circ", "90"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("[0.5, 1)", r"[\frac{1}{2},1)"),
        (".5", "0.5"),
        (r"\$18.90", "18.90"),
        (r"1\frac{1}{2}", "1.5"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("\\begin{pmatrix}1\\\\\n2\\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"x\ =\ 5", "5"),
        ("1{,}000", "1000"),
    ],
)
def test_equal(a: str, b: str) -> None:
    assert latex.equal(a, b)
    assert latex.equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [("1", "2"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "12"), ("x+1", "x"),
     (r"\frac{1}{0}", "1"), ("", "0"), ("1,2", "12"), (r"\sqrt{2}", "2")],
)  # fmt: skip
def test_different(a: str, b: str) -> None:
    assert not latex.equal(a, b)
    assert not latex.equal(None, b)
