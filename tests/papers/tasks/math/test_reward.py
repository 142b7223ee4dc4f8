r"""What a response of mathematics earns beyond tests/papers/tasks/earned.yaml: boxes, truths, cut-off responses.

Not covered: what is equal (test_verdicts.py), the processes that compare (test_processes.py), hostile and random text
(tests/papers/tasks/test_rewards.py).
"""

from pathlib import Path

import numpy as np
import pytest
import yaml

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
    """The score, and what is not 0 of the parts."""
    result = function("math500", response, truth, extra_info=extra_info, more=1)
    return result.pop("score"), {part for part, value in result.items() if value == 1.0}


RIGHT = (1.0, {"acc", "format"})
BOXES = yaml.safe_load(Path(__file__).with_name("boxes.yaml").read_text())
BOXES += [
    (rf"\boxed{{{'1' * MAX_ANSWER_LENGTH}}}", ["1" * MAX_ANSWER_LENGTH], True),
    (rf"\boxed{{{'1' * (MAX_ANSWER_LENGTH + 1)}}}", [None], False),
]


@pytest.mark.parametrize(("response", "answers", "finished"), BOXES)
def test_the_boxes_of_a_response(response, answers, finished):
    assert extract_answers(response) == (answers, finished)


def test_many_equal_boxes_are_not_an_answer_to_the_strict_reward():
    assert score(r"\boxed{5}" * MAX_BOXES, function=compute_score_strict) == RIGHT
    assert score(r"\boxed{5}" * (MAX_BOXES + 1), function=compute_score_strict) == (-1.0, set())


def test_a_response_that_was_cut_off_never_scores_and_other_extra_info_changes_nothing():
    for flag in (True, 1, np.True_, np.int64(1)):
        for function, least in ((compute_score, 0.0), (compute_score_strict, -1.0)):
            assert score(r"\boxed{5}", extra_info={"truncated": flag}, function=function) == (least, {"truncated"})
    for other in (None, {}, {"truncated": False}, {"truncated": None}, {"truncated": []}, 3, "x"):
        assert score(r"\boxed{5}", extra_info=other) == RIGHT


@pytest.mark.parametrize(
    ("truth", "accepted"),
    [
        (" 5\n", ["5"]),
        (5, ["5"]),
        (5.0, ["5"]),
        (5.5, ["5.5"]),
        (np.float64(5.0), ["5"]),
        (["4", "5"], ["4", "5"]),
        (np.array(["4", "5"], dtype=object), ["4", "5"]),
        (["", None, "5"], ["5"]),
        (["4"] * 100, ["4"] * MAX_ALTERNATIVES),
        *((nothing, []) for nothing in (None, "", [], True, {"a": 1}, b"5", float("nan"))),
        (float("inf"), ["inf"]),
        ('["4", "5"]', ["4", "5"]),
        ('[ "4", "5" ]', ["4", "5"]),
        ('\n[\n "4",\n "5"\n]', ["4", "5"]),
        ("[1, 2]", ["[1, 2]"]),
        ('["5', ['["5']),
    ],
)
def test_accepted_answers(truth, accepted):
    assert accepted_answers(truth) == accepted
    assert score(r"\boxed{5}", truth)[0] == float("5" in accepted)


@pytest.mark.parametrize(
    "answer", ["⑤", "Ⅴ", "٥", "х=5", "5\u200b", "\u202e5\u202c", "5\x00", "5\ud800", "5%%%", r"\left(5"]
)
def test_look_alikes_of_the_right_answer_do_not_pass(answer):
    for function in (compute_score, compute_score_strict, compute_score_for_evaluation):
        assert "acc" not in score(rf"\boxed{{{answer}}}", function=function)[1]
