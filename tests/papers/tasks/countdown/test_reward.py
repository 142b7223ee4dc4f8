"""Countdown's reward by hand. Every answer is given in tags and in a box.

Not covered: hostile text and verl's loading (tests/papers/tasks).
"""

import concurrent.futures
import gc
import time
from fractions import Fraction

import numpy as np
import pytest

from verl_clipx.papers.tasks.countdown.reward import compute_score

TRUTH = {"numbers": [3, 5, 2], "target": 16}
RIGHT = {"score": 1.0, "acc": 1.0, "format": 1.0}
WRONG = {"score": 0.0, "acc": 0.0, "format": 1.0}
NO_ANSWER = {"score": 0.0, "acc": 0.0, "format": 0.0}


def score(text, truth=TRUTH, source="countdown"):
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info={}, more=1)


ANSWERS = {
    "right": ["(3+5)*2", " ( 3 + 5 ) * 2 ", "\n2*(5+3)\n", "-(-3-5)*2", "+2*(5+3)"],
    # Also the right value from other numbers, and a division by zero.
    "wrong": ["3*5+2", "2*2*2*2", "16", "(3+5)*2*1", "(3+5)+(3+5)", "35-2", "3/(5-5)*2", "-" * 255 + "3"],
    "no answer": [
        *("2**(5-3)", "5//3*2", "(3+5)*2=16", "(3+5)*2.0", "(3+5)×2", r"(3+5)\times 2", "-" * 256 + "3"),
        *("(3+5)*2 # so", "(3+5)*2 if 1 else 2", "(3+5)*x", "(3+5)*²", "(3+5)*٢", "(3+5)\n*2", "3(5)(2)", "(3+5)*-~2"),
        *("(3+5)*\0", "(3+5)*2\ud800", "(" * 300 + "3", "(3+5)*", ""),
    ],
}
OUTCOMES = {"right": RIGHT, "wrong": WRONG, "no answer": NO_ANSWER}


@pytest.mark.parametrize(("outcome", "answer"), [(outcome, one) for outcome in ANSWERS for one in ANSWERS[outcome]])
def test_answers_by_hand(outcome, answer):
    assert score(f"so <answer>{answer}</answer> and so on") == OUTCOMES[outcome]
    assert score(f"so \\boxed{{{answer}}} and so on", source="countdown_boxed") == OUTCOMES[outcome]
    assert score(answer) == score(answer, source="countdown_boxed") == NO_ANSWER
    assert score(f"\\boxed{{{answer}}}") == NO_ANSWER
    assert score(f"<answer>{answer}</answer>", source="countdown_boxed") == NO_ANSWER


TAGS, BOX = "<answer>2*(5+3)</answer>", r"\boxed{2*(5+3)}"
# Only the last answer after the thinking counts, and only if it was finished.
RESPONSES = {
    ("countdown", "right"): [
        *("<answer>1</answer>" + TAGS, TAGS + "<answer>", "<answer>" + TAGS, "so</think>" + TAGS),
        "<think>so</think> " + TAGS,
    ],
    ("countdown", "wrong"): [TAGS + "<answer>2*5+3</answer>"],
    ("countdown", "no answer"): [
        *("<answer>(3+5)*2</answer", "(3+5)*2</answer>", "</answer>(3+5)*2<answer>", "", None),
        *("<think>" + TAGS, f"<think>{TAGS}</think>", TAGS + "</think> no"),
    ],
    ("countdown_boxed", "right"): [r"\boxed{3+5+2} no: " + BOX, "so</think>" + BOX, rf"\boxed{{{BOX}"],
    ("countdown_boxed", "wrong"): [BOX + r" no: \boxed{3+5+2}"],
    ("countdown_boxed", "no answer"): [
        r"\boxed{(3+5)*2",
        BOX + r" \boxed{",
        "<think>" + BOX,
        BOX + "</think> no",
        None,
    ],
}


@pytest.mark.parametrize(
    ("source", "outcome", "text"), [(*key, text) for key, texts in RESPONSES.items() for text in texts]
)
def test_which_answer_counts(source, outcome, text):
    assert score(text, source=source) == OUTCOMES[outcome]


@pytest.mark.parametrize(
    ("numbers", "target", "answer", "expected"),
    [
        ([8, 3, 8, 3], 24, "8/(3-8/3)", RIGHT),  # passes through thirds: floats would miss the exact value
        ([1, 3], Fraction(1, 3), "1/3", RIGHT),
        ([1, 3], 0.333333, "1/3", RIGHT),  # within 1e-5
        ([1, 3], 0.3333, "1/3", WRONG),
        ([3, 3], 9, "3*3", RIGHT),
    ],
)
def test_exact_arithmetic_within_the_tolerance(numbers, target, answer, expected):
    assert score(f"<answer>{answer}</answer>", {"numbers": numbers, "target": target}) == expected


@pytest.mark.parametrize("numbers", [np.array([3, 5, 2]), (3, 5, 2), [np.int64(5), 3.0, 2]])
@pytest.mark.parametrize("target", [16, 16.0, np.int64(16), np.float64(16)])
def test_containers_that_parquet_readers_give(numbers, target):
    assert score("<answer>(3+5)*2</answer>", {"numbers": numbers, "target": target}) == RIGHT


def test_json_is_read_like_the_fields():
    for target, expected in ((16, RIGHT), (17, WRONG)):
        assert score("<answer>(3+5)*2</answer>", f'{{"numbers": [3, 5, 2], "target": {target}}}') == expected


def test_garbage_collection_between_threads_does_not_raise():
    # Python 3.11 alone raises SystemError here: syntax trees built while a finaliser lets another thread in.
    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(0)

    def scores(depth):
        found = []
        for _ in range(300):
            Cycle()
            found.append(score("<answer>" + "(" * depth + "5 + 2" + ")" * depth + " * 3 - 5</answer>"))
        return found

    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(found == [WRONG] * 300 for found in pool.map(scores, range(8)))
    finally:
        gc.set_threshold(*before)
