r"""HiTab's reward and its comparison of answers: hand-made pairs of answers.txt, responses, and numbers of any kind.

A block of answers.txt begins with `# equal` or `# unequal`, and with what the expected answers are: a share, computed,
a list. A line is `expected answer @ given answer @ given answer …`; list items stand between ` ; `, line ends are \n.

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


def test_too_long_an_answer_and_one_to_nothing_are_wrong():
    longest = "1" + "0" * MAX_ANSWER_LENGTH
    assert not answers_match(longest, [longest]) and not answers_match("", [])


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3))
def test_a_number_equals_itself_in_other_clothes(value):
    for text in (f"{value}", f"{value:,}", f"{value}%", rf"\text{{{value}}}", f"{value} units"):
        assert answers_match(text, [str(value)])
    assert not answers_match(str(value + Decimal("0.001")), [str(value)])
