r"""All three rewards: hand-made responses, cut-off ones, and what limits a verdict's time.

Not covered: what is equal (test_verdicts.py), the processes that compare (test_processes.py), hostile and random text
(tests/papers/tasks/test_rewards.py).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from verl_clipx.papers.tasks.math import processes
from verl_clipx.papers.tasks.math.reward import (
    MAX_ALTERNATIVES,
    MAX_ANSWER_LENGTH,
    MAX_BOXES,
    accepted_answers,
    compute_score,
    compute_score_for_evaluation,
    compute_score_strict,
    extract_answers,
)


def score(response, truth="5", extra_info=None, function=compute_score):
    return function("math500", response, truth, extra_info=extra_info, more=1)


def parts(score, acc, format, truncated=0.0, undecided=0.0):
    return {"score": score, "acc": acc, "format": format, "truncated": truncated, "undecided": undecided}


RIGHT, RIGHT_STRICT = parts(1.0, 1.0, 1.0), parts(1.0, 1.0, 1.0)
WRONG, WRONG_STRICT = parts(0.0, 0.0, 1.0), parts(-1.0, 0.0, 1.0)
UNFORMATTED, UNFORMATTED_STRICT = parts(0.0, 0.0, 0.0), parts(-1.0, 0.0, 0.0)
CUT_OFF, CUT_OFF_STRICT = parts(0.0, 0.0, 0.0, truncated=1.0), parts(-1.0, 0.0, 0.0, truncated=1.0)
UNDECIDED, UNDECIDED_STRICT = parts(0.0, 0.0, 1.0, undecided=1.0), parts(-1.0, 0.0, 1.0, undecided=1.0)


BOXES = yaml.safe_load(Path(__file__).with_name("boxes.yaml").read_text())
BOXES += [
    (rf"\boxed{{{'1' * MAX_ANSWER_LENGTH}}}", ["1" * MAX_ANSWER_LENGTH], True),
    (rf"\boxed{{{'1' * (MAX_ANSWER_LENGTH + 1)}}}", [None], False),
]


@pytest.mark.parametrize(("response", "answers", "finished"), BOXES)
def test_the_boxes_of_a_response(response, answers, finished):
    assert extract_answers(response) == (answers, finished)


def test_many_equal_boxes_are_not_an_answer_to_the_strict_reward():
    assert score(r"\boxed{5}" * MAX_BOXES, function=compute_score_strict) == RIGHT_STRICT
    assert score(r"\boxed{5}" * (MAX_BOXES + 1), function=compute_score_strict) == UNFORMATTED_STRICT


def test_a_response_that_was_cut_off_never_scores_and_other_extra_info_changes_nothing():
    for flag in (True, 1, np.True_, np.int64(1)):
        assert score(r"\boxed{5}", extra_info={"truncated": flag}) == CUT_OFF
        assert score(r"\boxed{5}", extra_info={"truncated": flag}, function=compute_score_strict) == CUT_OFF_STRICT
    for other in (None, {}, {"truncated": False}, {"truncated": None}, {"truncated": []}, 3, "x"):
        assert score(r"\boxed{5}", extra_info=other) == RIGHT


@pytest.mark.parametrize(
    ("truth", "accepted"),
    [
        ("5", ["5"]),
        (" 5\n", ["5"]),
        (5, ["5"]),
        (5.0, ["5"]),
        (5.5, ["5.5"]),
        (np.float64(5.0), ["5"]),
        (["4", "5"], ["4", "5"]),
        (np.array(["4", "5"], dtype=object), ["4", "5"]),
        ("5", ["5"]),
        (["", None, "5"], ["5"]),
        (["4"] * 100, ["4"] * MAX_ALTERNATIVES),
        (None, []),
        ("", []),
        ([], []),
        (True, []),
        ({"a": 1}, []),
        (b"5", []),
        (float("nan"), []),
        (float("inf"), ["inf"]),
        ('["4", "5"]', ["4", "5"]),
        ("[1, 2]", ["[1, 2]"]),
        ('["5', ['["5']),
    ],
)
def test_accepted_answers(truth, accepted):
    assert accepted_answers(truth) == accepted
    assert score(r"\boxed{5}", truth)["score"] == float("5" in accepted)


@pytest.mark.parametrize(
    ("box", "truth", "expected"),
    [
        ("0.02", '["0.01", "0.02"]', RIGHT),
        ("0.03", '["0.01", "0.02"]', WRONG),
        ("0.02", ["0.01", "0.02"], RIGHT),
        ("x", ["9^{9^9}", "x"], RIGHT),
        ("y", ["9^{9^9}", "7"], UNDECIDED),
        ("$$$$5$$$$$\n\n", "5", RIGHT),  # mere typesetting
    ],
)
def test_any_accepted_spelling_counts(box, truth, expected):
    assert score(f"\\boxed{{{box}}}", truth) == expected


@pytest.mark.parametrize(
    "answer", ["５", "٥", "х=5", "5\u200b", "\u202e5\u202c", "5\x00", "5\ud800", "5%%%", r"\left(5"]
)
def test_look_alikes_of_the_right_answer_do_not_pass(answer):
    for function in (compute_score, compute_score_strict, compute_score_for_evaluation):
        assert score(rf"\boxed{{{answer}}}", function=function)["acc"] == 0.0


# Passes the guards, and sympy simplifies its difference to f(x) for minutes.
ENDLESS = r"\boxed{f(x)+(x+1)^{999}-(x+2)^{998}}"


@pytest.mark.slow
def test_a_verdict_has_one_limit_however_many_answers_are_accepted(monkeypatch):
    assert score(r"\boxed{x+y}", "y+x")["acc"] == 1.0  # a process is there
    monkeypatch.setattr(processes, "SECONDS", 2)
    started = time.monotonic()
    for function in (compute_score_strict, compute_score_for_evaluation):
        result = score(ENDLESS, [f"f(x)+{index}" for index in range(MAX_ALTERNATIVES)], function=function)
        assert (result["acc"], result["undecided"]) == (0.0, 1.0)
    # The limit, and pebble's moments to notice and to end the process.
    assert time.monotonic() - started < 2 * (2 + 3)


@pytest.mark.slow
def test_endless_comparisons_take_no_verdict_from_others(monkeypatch):
    """Eight threads share two processes, all busy for seconds; what a right answer waits is not counted against it."""
    monkeypatch.setattr(processes, "SECONDS", 2)
    with ThreadPoolExecutor(8) as threads:
        endless = [threads.submit(score, ENDLESS, f"f(x)-{index}") for index in range(2)]
        honest = [threads.submit(score, rf"\boxed{{x+y+{index}}}", f"y+{index}+x") for index in range(20)]
    assert [future.result() for future in honest] == [RIGHT] * 20
    assert [future.result() for future in endless] == [UNDECIDED] * 2
