"""Countdown's reward by hand. Every answer is given in tags and in a box.

Not covered: hostile text and verl's loading (tests/papers/tasks).
"""

import concurrent.futures
import gc
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from verl_clipx.papers.tasks.countdown.reward import compute_score

TRUTH = {"numbers": [3, 5, 2], "target": 16}
RIGHT = {"score": 1.0, "acc": 1.0, "format": 1.0}
WRONG = {"score": 0.0, "acc": 0.0, "format": 1.0}
NO_ANSWER = {"score": 0.0, "acc": 0.0, "format": 0.0}


def score(text, truth=TRUTH, source="countdown"):
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info={}, more=1)


OUTCOMES = {"right": RIGHT, "wrong": WRONG, "no answer": NO_ANSWER}
LISTS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
ANSWERS = [(outcome, answer) for outcome, answers in LISTS["answers"].items() for answer in answers]
# The longest answer that is read, and one of a character more.
ANSWERS += [("wrong", "-" * 255 + "3"), ("no answer", "-" * 256 + "3")]
# What YAML cannot hold.
ANSWERS += [("no answer", "(" * 300 + "3"), ("no answer", "(3+5)*2\ud800")]


@pytest.mark.parametrize(("outcome", "answer"), ANSWERS)
def test_answers_by_hand(outcome, answer):
    assert score(f"so <answer>{answer}</answer> and so on") == OUTCOMES[outcome]
    assert score(f"so \\boxed{{{answer}}} and so on", source="countdown_boxed") == OUTCOMES[outcome]
    assert score(answer) == score(answer, source="countdown_boxed") == NO_ANSWER
    assert score(f"\\boxed{{{answer}}}") == NO_ANSWER
    assert score(f"<answer>{answer}</answer>", source="countdown_boxed") == NO_ANSWER


@pytest.mark.parametrize(("source", "outcome", "text"), LISTS["responses"])
def test_which_answer_counts(source, outcome, text):
    if text:
        text = text.replace("{tags}", "<answer>2*(5+3)</answer>").replace("{box}", r"\boxed{2*(5+3)}")
    assert score(text, source=source) == OUTCOMES[outcome]


@pytest.mark.parametrize(("numbers", "target", "answer", "outcome"), LISTS["exactly"])
def test_exact_arithmetic_within_the_tolerance(numbers, target, answer, outcome):
    assert score(f"<answer>{answer}</answer>", {"numbers": numbers, "target": target}) == OUTCOMES[outcome]


@pytest.mark.parametrize(
    "truth",
    [
        {"numbers": [3, 5, 2], "target": 16.0},
        {"numbers": [3, 5, 2], "target": np.int64(16)},
        {"numbers": [3, 5, 2], "target": np.float64(16)},
        {"numbers": np.array([3, 5, 2]), "target": 16},
        {"numbers": (3, 5, 2), "target": 16},
        {"numbers": [np.int64(5), 3.0, 2], "target": 16},
        '{"numbers": [3, 5, 2], "target": 16}',
    ],
    ids=repr,
)
def test_what_parquet_readers_give_and_json_are_truths(truth):
    assert score("<answer>(3+5)*2</answer>", truth) == RIGHT
    assert score("<answer>3*5+2</answer>", truth) == WRONG


def test_garbage_collection_between_threads_does_not_raise():
    # Python 3.11 alone raises SystemError here: syntax trees built while a finaliser lets another thread in.
    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(0)

    def score_in_parentheses(depth):
        scores = []
        for _ in range(300):
            Cycle()
            scores.append(score("<answer>" + "(" * depth + "5 + 2" + ")" * depth + " * 3 - 5</answer>"))
        return scores

    usual_thresholds = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for scores in pool.map(score_in_parentheses, range(8)):
                assert scores == [WRONG] * 300
    finally:
        gc.set_threshold(*usual_thresholds)
