"""Countdown's reward: hand-made cases, and thousands of generated responses against an independent evaluation.

Every answer is given in tags and in a box. Not covered: hostile text and verl's loading (tests/papers/tasks).
"""

import collections
import concurrent.futures
import gc
import random
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(3+5)*2", RIGHT),
        (" ( 3 + 5 ) * 2 ", RIGHT),
        ("\n2*(5+3)\n", RIGHT),
        ("-(-3-5)*2", RIGHT),
        ("+2*(5+3)", RIGHT),
        ("3*5+2", WRONG),
        ("2*2*2*2", WRONG),  # right value, other numbers
        ("16", WRONG),
        ("(3+5)*2*1", WRONG),
        ("(3+5)+(3+5)", WRONG),
        ("35-2", WRONG),
        ("3/(5-5)*2", WRONG),
        ("2**(5-3)", NO_ANSWER),
        ("5//3*2", NO_ANSWER),
        ("(3+5)*2=16", NO_ANSWER),
        ("(3+5)*2.0", NO_ANSWER),
        ("(3+5)×2", NO_ANSWER),
        (r"(3+5)\times 2", NO_ANSWER),
        ("-" * 255 + "3", WRONG),
        ("-" * 256 + "3", NO_ANSWER),
    ],
)
def test_answers_by_hand(answer, expected):
    assert score(f"so <answer>{answer}</answer> and so on") == expected
    assert score(f"so \\boxed{{{answer}}} and so on", source="countdown_boxed") == expected
    assert score(answer) == score(answer, source="countdown_boxed") == NO_ANSWER
    assert score(f"\\boxed{{{answer}}}") == NO_ANSWER
    assert score(f"<answer>{answer}</answer>", source="countdown_boxed") == NO_ANSWER


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("countdown", "<answer>1</answer><answer>2*(5+3)</answer>", RIGHT),
        ("countdown", "<answer>2*(5+3)</answer><answer>", RIGHT),
        ("countdown", "<answer><answer>2*(5+3)</answer>", RIGHT),
        ("countdown", "<answer>2*(5+3)</answer><answer>2*5+3</answer>", WRONG),  # only the last one counts
        ("countdown", "<answer>(3+5)*2</answer", NO_ANSWER),
        ("countdown", "(3+5)*2</answer>", NO_ANSWER),
        ("countdown", "</answer>(3+5)*2<answer>", NO_ANSWER),
        ("countdown", "", NO_ANSWER),
        ("countdown_boxed", r"\boxed{3+5+2} no: \boxed{(3+5)*2}", RIGHT),
        ("countdown_boxed", r"\boxed{(3+5)*2} no: \boxed{3+5+2}", WRONG),
        ("countdown_boxed", r"\boxed{(3+5)*2", NO_ANSWER),
        ("countdown_boxed", r"<think>\boxed{(3+5)*2}", NO_ANSWER),
        ("countdown_boxed", None, NO_ANSWER),
    ],
)
def test_which_answer_counts(source, text, expected):
    assert score(text, source=source) == expected


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
    assert score("<answer>(3+5)*2</answer>", '{"numbers": [3, 5, 2], "target": 16}') == RIGHT
    assert score("<answer>(3+5)*2</answer>", '{"numbers": [3, 5, 2], "target": 17}') == WRONG


def python_value(text: str) -> Fraction | None:
    """What Python itself makes of an expression, with numbers as fractions."""
    try:
        return eval("".join(f"F({c})" if c.isdigit() else c for c in text), {"__builtins__": {}, "F": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


JUNK = ("=16", "x", "²", "٣", "\0", "\ud800", "**2", "//1", ".0", "<answer>", "</answer>", "(" * 300)
AROUND = (("", ""), ("so</think>", ""), ("<think>so</think> ", "."), ("<think>", "</think>"))


def completions(count):
    """Yield responses, what Countdown's rule makes of them, and what was put into the answer."""
    rng = random.Random(0)
    for _ in range(count):
        numbers = rng.sample("352", 3) if rng.random() < 0.8 else rng.choices("3526", k=rng.randint(1, 4))
        expression = numbers[0]
        for number in numbers[1:]:
            form = rng.choice(["{0}{1}{2}", "({0}{1}{2})", "{2}{1}{0}"])
            expression = form.format(expression, rng.choice("+-*/"), number)
        if rng.random() < 0.2:
            expression = rng.choice(["(3+5)*2", "2*(5+3)", "-(-3-5)*2"])
        junk = rng.choice(JUNK) if rng.random() < 0.5 else ""
        position = rng.randint(0, len(expression))
        opening, closing = rng.choice(AROUND)
        numbers = sorted(character for character in expression if character.isdigit())
        right = numbers == ["2", "3", "5"] and python_value(expression) == 16 and not junk and closing != "</think>"
        yield f"{opening}<answer>{expression[:position]}{junk}{expression[position:]}</answer>{closing}", right, junk


def test_fifteen_thousand_completions_agree_with_the_rule():
    outcomes = collections.Counter()
    for text, right, junk in completions(15_000):
        result = score(text)
        assert result in (RIGHT, WRONG, NO_ANSWER)
        # A tag inside the answer can leave a right expression: then only the form of the result is checked.
        if "answer>" not in junk:
            assert result["score"] == float(right), text
            boxed = text.replace("<answer>", "\\boxed{").replace("</answer>", "}")
            assert score(boxed, source="countdown_boxed") == result
        outcomes[tuple(result.values())] += 1
    assert min(outcomes.values()) > 100 and len(outcomes) == 3, outcomes


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
