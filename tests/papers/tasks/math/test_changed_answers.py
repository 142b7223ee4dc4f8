r"""A right answer of which one token is inserted, deleted, swapped or repeated is right only if its value is the same.

The value is that of `oracle`, which shares no parser with the product. Tokens that make another statement of any answer
are put before and after each right answer as well.

Not covered: lists, sets and relations beyond these tokens, whose values the oracle does not know.
"""

import random
import re

import pytest

from tests.papers.tasks.math.oracle import Unreadable, value_of
from tests.papers.tasks.math.test_verdicts import STORED
from verl_clipx.papers.tasks.math.equality import equal_answers, is_equivalent

ANSWERS = 300
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|[A-Za-z]+|\S")
CHOICE = re.compile(r"\(?[A-Da-d]\)?(?: \d+)?")
RIGHT = list(dict.fromkeys((gold, box) for gold, box, training, evaluation in STORED if training == evaluation == "1"))

# What is inserted.
INSERTED = r"""
0 1 2 3 10 25 0.5 x y n a b i e \pi \theta \alpha + - * / ^ _ ! | ( ) [ ] { } \{ \} , ; : = < > \frac \sqrt \cdot
\times \pm \le \ge \ne \in \cup \cap \infty \sin \log \text{to} \text{not} \text{cm} \text{half} \text{or} \land
\lor \neg \nabla \partial \vec \bar \phantom \mathbb \left \right \circ \% % d dx to not half out of times
squared or and
"""
TOKENS = INSERTED.split()
BEFORE = [
    r"\text{not }",
    r"\neg ",
    r"\phantom{3}",
    r"2\text{ to }",
    r"10\text{ girls and }",
    "3 out of ",
    r"\nabla\cdot ",
]
AFTER = [
    r"\text{ squared}",
    r"\text{ or so}",
    r"\phantom{3}",
    r"+\frac{dy}{dx}",
    r"\text{ to }4",
    r"\text{ girls and }12\text{ boys}",
    r"\text{ remainder }3",
    " to 4",
    r"\times\nabla",
    r"\land q",
]


def readable():
    """The right answers whose values the oracle knows: no choices, and no units in plain letters."""
    for gold, box in RIGHT:
        if CHOICE.fullmatch(box) or (r"\text" in gold and r"\text" not in box):
            continue
        try:
            yield gold, box, value_of(box)
        except Unreadable:
            continue


def changed(box, draw, tokens):
    """A copy for each kind of change, at places that are drawn."""
    parts = re.findall(rf"{TOKEN.pattern}|\s+", box)
    first, second = draw.randrange(len(parts)), draw.randrange(len(parts))
    swapped = list(parts)
    swapped[first], swapped[second] = parts[second], parts[first]
    yield "".join([*parts[:first], draw.choice(tokens), *parts[first:]])
    yield "".join(parts[:first] + parts[first + 1 :])
    yield "".join([*parts[:first], parts[first], *parts[first:]])
    yield "".join(swapped)


def is_right(box, gold):
    return is_equivalent(box, gold) is True or equal_answers(box, gold) is True


def test_the_oracle_by_hand():
    halves = [r"\frac12", "0.5", r"\sin 30^\circ", "2^{-1}", r"\sqrt{\frac14}", "1/2", r"\frac{1}{2}\text{ hour}"]
    assert {value_of(half) for half in halves} == {(5.0, 0.0, 0.1)}
    assert value_of("2ab") == value_of("2ba") != value_of("2a+b")
    assert value_of("2\\frac12")[0] == 2.5
    for text in ("3 4", "x2", r"\text{to}", r"\nabla", "((1,2))", "(1", r"\phantom{7}"):
        with pytest.raises(Unreadable):
            value_of(text)


# Changes of the typesetting or of a unit alone, judged by hand.
SAME = {(r"\$36", r"36\text{ }dollars")}


def test_a_changed_token_changes_the_verdict_unless_the_value_is_the_same():
    known = sorted(readable(), key=lambda answer: random.Random(repr(answer[:2])).random())[:ANSWERS]
    judged, wrong = 0, []
    for gold, box, value in known:
        for mutant in changed(box, random.Random(box), TOKENS):
            if "".join(mutant.split()) == "".join(box.split()) or (gold, mutant) in SAME:
                continue
            judged += 1
            if is_right(mutant, gold) and _value_or_none(mutant) != value:
                wrong.append((gold, box, mutant))
    assert len(known) == ANSWERS and judged > 1000
    assert wrong == []


def _value_or_none(text):
    try:
        return value_of(text)
    except Unreadable:
        return None


def test_words_and_operators_around_an_answer_make_another_answer():
    wrong = []
    # Of a choice and what it offers, one is enough.
    statements = [pair for pair in RIGHT if "(B)" not in pair[0] + pair[1]]
    for gold, box in sorted(statements, key=lambda answer: random.Random(repr(answer)).random())[:ANSWERS]:
        draw = random.Random(box)
        for mutant in (draw.choice(BEFORE) + box, box + draw.choice(AFTER)):
            if is_right(mutant, gold):
                wrong.append((gold, mutant))
    assert wrong == []
