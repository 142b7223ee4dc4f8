r"""Both equalities, by hand; where they must differ; that pairs are cached.

Not covered: the processes behind them (test_pool.py), extraction (test_extraction.py).
"""

import pytest

from verl_clipx.papers.tasks.math import equality
from verl_clipx.papers.tasks.math.equality import equal_answers, is_equivalent

# answer, right answer
EQUAL = [
    ("5", "5"),
    ("5.", "$5$"),
    ("73", "073"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", "0.50"),
    ("3,500", "3500"),
    (r"3{,}500", "3500"),
    ("142.0", "142"),
    (r"7\times10^{37}", "7e37"),
    (r"50\%", "0.5"),
    ("x=5", "5"),
    ("5", "x=5"),
    (r"2\text{ cm}", "2"),
    ("2,1", "1,2"),
    ("84,69", "$69$,$84$"),
    (r"\{2,1\}", "1,2"),
    ("(1.5,-1)", r"\left(\frac{3}{2},-1\right)"),
    (r"1+\sqrt2", r"\sqrt{2}+1"),
    (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt{2}}{2}"),
    ("(x-1)(x+1)", "x^2-1"),
    ("even", r"\text{even}"),
    ("90", r"90^\circ"),
    ("(A)", r"\text{(A)}"),
    (r"(-\infty, 2]", r"\left(-\infty,2\right]"),
    ("\\begin{pmatrix}\n 1 \\\\\n \\frac{4}{2}\n\\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"5\text{ cm3}", "5"),
    (r"5\text{ m/s^2}", "5"),
    (r"2\text{ and }3", "3,2"),
    (r"4.5 \cdot 10^{-33}", "4.5e-33"),
    (r"\frac{9}{2 \cdot 10^{33}}", r"\frac{45}{10^{34}}"),
    ("friday", r"\text{Friday}"),
    ("yx", "xy"),
    (r"10,\!236", "10236"),
    (r"10236", r"10,\! 236"),
    (r"12\,345\,678", "12345678"),
    (r"1,\!2,\!3", "1,2,3"),
    (r"\$18.90", "18.9"),
    (r"5.4\text{ cents}", "5.4"),
    (r"3.5\text{ cm}^2", r"\frac{7}{2}\mathrm{ cm}^2"),
    (r"0.5^\circ", "0.5"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("10^{-3}", "0.001"),
    ("-10^2", "-100"),
    (r"90\text{ degrees}", r"90^\circ"),
    (r"90^{\circ}", r"90^\circ"),
    (r"\mathbb R", r"\mathbb{R}"),
    (r"2516_{8}", "2516_8"),
    (r"3\text{ hundred}", r"3 \text{hundred}"),
    ("q^{99999}", "q^{99999}"),  # refused by a guard, equal as text
]

UNEQUAL = [
    ("6", "5"),
    ("-5", "5"),
    ("0.33", "1/3"),
    ("12.1", "12"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("1,2,3", "1,2"),
    ("5 or 7", "7"),
    ("5,7", "7"),
    ("1  2", "12"),  # two blanks separate as one does
    (r"5\text{ or 6}", "5"),
    (r"5\text{ or six}", "5"),
    (r"5 \mbox{, 6}", "5"),
    (r"x+5\text{ or 6}.", "x+5"),
    ("9e-33", "4.5e-33"),
    (r"\frac{9}{10^{33}}", "4.5e-33"),
    (r"\frac{9}{10^{33}}", r"\frac{9}{10^{32}}"),
    ("0.0000002", "0.0000001"),
    ("0", "4.5e-33"),
    ("sey", "yes"),
    ("CBA", r"\text{ABC}"),
    (r"1\,2", "12"),
    (r"10,\!23", "1023"),
    (r"5.4\text{ cents}", "5.5"),
    (r"x \in [-2,7]", "(-2,7)"),
    (r"x \in [-2,7]", "-2,7"),
    ("x", "y"),
    (r"\sqrt{3}", r"\sqrt{2}"),
    ("x^2+1", "x^2-1"),
    ("", "5"),
    ("5", ""),
    ("$", "$"),
    (r"\text{odd}", "even"),
    ("2516_7", "2516_8"),
    ("101_2", "101_{10}"),
    (r"x=3 \lor x=5", "5"),
    (r"3 \vee 5", "5"),
    (r"3 \approx 5", "3"),
    (r"3 \approx 5", "5"),
    (r"\frac{1}{2}\text{ is wrong, the answer is }\sqrt{3}", r"\frac{1}{2}"),
    (r"3\text{ million}", "3"),
    (r"3\,\mathrm{Thousand}", "3"),
    ("10^{-3}", "0.01"),
    (r"\mathbb R", r"\mathbb{Q}"),
    (r"\text{north}\text{east}", r"\text{north}"),
]

# Right for training by math-verify's conventions, and not beyond reasonable doubt.
LENIENT = [
    (r"50\%", "50"),
    ("0.333333", "1/3"),
    ("3.14159265", r"\pi"),
    ("1,2", "(1,2)"),
    ("(1,2)", "1,2"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"\sqrt{3} \approx 1.73", r"\sqrt{3}"),
    (r"x \approx 3.14", "3.14"),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_for_both(answer, gold):
    assert is_equivalent(answer, gold) is True
    assert equal_answers(answer, gold) is True


@pytest.mark.parametrize(("answer", "gold"), UNEQUAL)
def test_unequal_for_both(answer, gold):
    assert is_equivalent(answer, gold) is False
    assert equal_answers(answer, gold) is False


@pytest.mark.parametrize(("answer", "gold"), LENIENT)
def test_evaluation_does_not_accept_what_training_does(answer, gold):
    assert is_equivalent(answer, gold) is True
    assert equal_answers(answer, gold) is False


@pytest.mark.parametrize("answer", ["9^{9^9}", "５", "(" * 200 + "5" + ")" * 200, r"\sum_{n=1}^{9}n"])
def test_a_refused_comparison_is_undecided_and_not_equal(answer):
    assert is_equivalent(answer, "5") is None
    assert is_equivalent("5", answer) is None
    assert equal_answers(answer, "5") is None


@pytest.mark.parametrize(("answer", "gold"), EQUAL + UNEQUAL)
def test_the_conservative_equality_is_symmetric(answer, gold):
    assert equal_answers(gold, answer) is equal_answers(answer, gold)


def test_all_accepted_answers_are_one_question():
    assert is_equivalent("x+1", "x", "1+x") is True
    assert is_equivalent("x+1", "x", "2+x") is False
    assert is_equivalent("x+1", "x", "x+") is None  # the second can't be read
    assert is_equivalent("x+1", "x+", "1+x") is True
    assert is_equivalent("x+1") is False
    assert equal_answers("x+1", "x", "1+x") is True


# Ordinary forms that the rule on whole boxes must not lose: answer, right answer.
WHOLE = [
    (r"\left(\frac{1}{2},\,3\right)", r"(\frac12, 3)"),
    (r"\left\{1,2\right\}", "1,2"),
    (r"\left|x\right|", "|x|"),
    (r"\left\lfloor x\right\rfloor+1", r"1+\lfloor x\rfloor"),
    (r"\bigl(1,2\bigr)", "(1,2)"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"5\text{ kg}\cdot\text{m/s}^2", "5"),
    (r"15000 \text{ kcal m}^{-2} \text{yr}^{-1}", "15000"),
    (r"\text{Area}=\frac12\text{ cm}^2", "1/2"),
    (r"(52_8)", "52_8"),
    (r"x=52_8", r"52_{\text{eight}}"),
    (r"1{,}203_4", "1203_4"),
    (r"a_{12}+1", "1+a_{12}"),
    (r"\log_{2}{x}+1", r"1+\log_2 x"),
    (r"\sqrt[3]{2}\cdot 2", r"2\sqrt[3]{2}"),
    (r"\tfrac{\pi}{4}", r"\frac{1}{4}\pi"),
    (r"33.\overline{3}\%", r"\frac{1}{3}"),
    (r"(0.\overline{3},2)", r"\left(\frac{1}{3},2\right)"),
    (r"-1\frac12", "-1.5"),
    (r"\frac{-1}{-2}", "0.5"),
    (r"(-\infty,1)\cup(3,\infty)", r"\left(-\infty,1\right)\cup\left(3,\infty\right)"),
    ("y=2x+1", "y=1+2x"),
]


@pytest.mark.parametrize(("answer", "gold"), WHOLE)
def test_ordinary_forms_are_read_as_a_whole(answer, gold):
    assert is_equivalent(answer, gold) is True
    assert equal_answers(answer, gold) is True


@pytest.mark.parametrize(
    "answer",
    [
        r"5\approx",
        r"\approx 5",
        r"5\left",
        r"\sqrt{25}\right",
        "#5",
        "5=",
        "[5",
        "5;",
        r"x\to 5",
        "(5_8",
        "9_8",
        "5_{99}",
        r"\frac{5}{1_2}",
        r"\sqrt{25}\text{ if }x>\frac{1}{2}",
    ],
)
def test_nothing_is_left_out_of_a_box(answer):
    assert is_equivalent(answer, "5") is not True
    assert equal_answers(answer, "5") is not True


@pytest.mark.parametrize(("answer", "gold"), [(r"\pi\ge 9", r"\emptyset"), ("8>9", r"\{\}"), ("x>3", "(3,4)")])
def test_an_inequality_is_the_set_of_its_solutions_only(answer, gold):
    assert is_equivalent(answer, gold) is False
    assert equal_answers(answer, gold) is False


def test_a_pair_is_compared_once(monkeypatch):
    asked = []

    class Pool:
        def compare(self, pairs, both_ways):
            asked.append((pairs, both_ways))
            return True

    monkeypatch.setattr(equality, "shared_pool", Pool)
    equality._compare_symbolically.cache_clear()
    try:
        assert [is_equivalent("a_1+b", "b+a_1") for _ in range(3)] == [True, True, True]
        assert asked == [((("b+a_1", "a_1+b"),), False)]
        assert is_equivalent("4", "5") is False
        assert len(asked) == 1  # numbers need no process
    finally:
        equality._compare_symbolically.cache_clear()
