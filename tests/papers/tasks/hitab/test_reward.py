"""HiTab's reward and its comparison of answers: the hand-made pairs of answers.txt, responses, and numbers of any kind.

A block of answers.txt begins with `# equal` or `# unequal`, and with what the expected answers are: a share, computed,
a list. A line is `expected answer @ given answer @ given answer …`; list items stand between ` ; `, line ends are \\n.

Not covered: agreement with people's judgement on real completions; verl's reward manager.
"""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.papers.tasks.hitab.answers import MAX_ANSWER_LENGTH, answers_match
from verl_clipx.papers.tasks.hitab.reward import compute_score

ANSWERS = ["ostholm", "2400"]
TRUTH = {"answers": ANSWERS, "ratio": False, "rounding": False}


def test_truths_in_other_containers():
    for truth in (json.dumps(TRUTH), *(TRUTH | {"answers": kind(ANSWERS)} for kind in (tuple, np.array))):
        for text in (r"\boxed{2400 | Ostholm}", r"\boxed{ostholm}"):
            assert compute_score("hitab", text, truth) == compute_score("hitab", text, TRUTH)


def pairs():
    for line in Path(__file__).with_name("answers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            verdict, *kinds = line[2:].split()
            continue
        expected, *given = line.split(" @ ")
        for answer in given:
            yield answer.replace(r"\n", "\n"), tuple(expected.split(" ; ")), tuple(kinds), verdict == "equal"


@pytest.mark.parametrize(("answer", "expected", "kinds", "equal"), list(pairs()))
def test_pairs_by_hand(answer, expected, kinds, equal):
    assert len(expected) == 1 or "list" in kinds
    assert answers_match(answer, expected, ratio="share" in kinds, rounding="computed" in kinds) == equal


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("9" * 70, ["9" * 70 + ".0"], False),  # too long for a number, and for an answer
        ("1" + "0" * MAX_ANSWER_LENGTH, ["1" + "0" * MAX_ANSWER_LENGTH], False),
        # 1.25 is within rounding of both 1.249 and 1.2504, 1.250 only of 1.2504: greed would fail.
        ("1.25 | 1.250", ["1.2504", "1.249"], True),
        ("1.250 | 1.250", ["1.2504", "1.249"], False),
        ("", [], False),
    ],
)
def test_computed_answers_by_hand(answer, expected, equal):
    assert answers_match(answer, expected, rounding=True) == equal


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3))
def test_a_number_equals_itself_in_other_clothes(value):
    for text in (f"{value}", f"{value:,}", f"{value}%", rf"\text{{{value}}}", f"{value} units"):
        assert answers_match(text, [str(value)])
    assert not answers_match(str(value + Decimal("0.001")), [str(value)])
