r"""Countdown's boxed reward: the box decides, the rule is the tagged reward's, hostile text scores 0.

Not covered: the rule itself (test_reward.py).
"""

import random

import pytest

from verl_clipx.papers.tasks.countdown.boxed_reward import compute_score
from verl_clipx.papers.tasks.countdown.reward import MAX_ANSWER_LENGTH
from verl_clipx.papers.tasks.countdown.reward import compute_score as compute_tagged_score

TRUTH = {"numbers": [3, 5, 2], "target": 16}


def score(text, truth=TRUTH):
    return compute_score("countdown_boxed", text, truth, extra_info={}, more=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"3+5 is 8. \boxed{(3+5)*2}", (1, 1)),
        (r"\boxed{ ( 3 + 5 ) * 2 }", (1, 1)),
        (r"\boxed{3+5+2} no: \boxed{(3+5)*2}", (1, 1)),
        (r"\boxed{(3+5)*2} no: \boxed{3+5+2}", (0, 1)),
        (r"\boxed{16}", (0, 1)),
        (r"\boxed{(3+5)\times 2}", (0, 0)),
        (r"\boxed{(3+5)*2 = 16}", (0, 0)),
        (r"\boxed{(3+5)*2", (0, 0)),
        ("<answer>(3+5)*2</answer>", (0, 0)),
        ("", (0, 0)),
        (None, (0, 0)),
        ("\\boxed{" + "(" * 5000 + "3" + ")" * 5000 + "}", (0, 0)),
        ("\\boxed{" * 100_000, (0, 0)),
        ("\\boxed{__import__('os').abort()}", (0, 0)),
        ("\\boxed{9**9**9**9}", (0, 0)),
        ("\\boxed{" + "-" * (MAX_ANSWER_LENGTH - 1) + "3}", (0, 1)),
    ],
)
def test_by_hand(text, expected):
    correct, form = expected
    assert score(text) == {"score": correct, "acc": correct, "format": form}


def test_ten_thousand_completions_agree_with_the_tagged_reward():
    generator = random.Random(0)
    pieces = ["3", "5", "2", "+", "-", "*", "/", "(", ")", " ", "16", "x", "²", "\n", "\0", "**", "=", "٣"]
    right = 0
    for _ in range(10_000):
        answer = "".join(generator.choices(pieces, k=generator.randrange(12)))
        if generator.random() < 0.2:
            answer = generator.choice(["(3+5)*2", "2*(5+3)", "3*5+2", "-(-3-5)*2"])
        found = score(f"thinking \\boxed{{{answer}}}")
        assert found == compute_tagged_score("countdown", f"<answer>{answer}</answer>", TRUTH)
        right += found["score"]
    assert 500 < right < 3000
