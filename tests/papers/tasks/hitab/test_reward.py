"""HiTab's reward: hand-made responses, hostile text, and 10,000 generated completions.

Not covered: the comparison itself (test_answers.py); verl's reward manager.
"""

import json
import random

import numpy as np
import pytest

from verl_clipx.papers.tasks.hitab.reward import compute_score

TRUTH = {"answers": ["ostholm", "2400"], "ratio": False, "rounding": False}
RIGHT = {"score": 1.0, "acc": 1.0, "format": 1.0}
WRONG = {"score": 0.0, "acc": 0.0, "format": 1.0}
NO_ANSWER = {"score": 0.0, "acc": 0.0, "format": 0.0}


def score(text, truth=TRUTH):
    return compute_score("hitab", text, truth, extra_info={}, more=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"</think><answer>\boxed{ostholm | 2,400}</answer>", RIGHT),
        (r"\boxed{2400 | Ostholm}", RIGHT),
        (r"\boxed{no} \boxed{\text{ostholm}; 2400}", RIGHT),
        (r"\boxed{ostholm | 2400} \boxed{no}", WRONG),
        (r"\boxed{ostholm}", WRONG),
        (r"\boxed{ostholm | 2400 | 2500}", WRONG),
        (r"\boxed{ }", NO_ANSWER),
        (r"\boxed{ostholm | 2400", NO_ANSWER),
        ("ostholm | 2400", NO_ANSWER),
        ("<answer>ostholm | 2400</answer>", NO_ANSWER),
        ("", NO_ANSWER),
        (None, NO_ANSWER),
    ],
)
def test_by_hand(text, expected):
    assert score(text) == expected


@pytest.mark.parametrize("container", [tuple, np.array])
def test_containers_that_parquet_readers_give(container):
    assert score(r"\boxed{ostholm | 2400}", TRUTH | {"answers": container(TRUTH["answers"])}) == RIGHT


def test_a_share_given_in_percent():
    truth = {"answers": ["0.876264"], "ratio": True, "rounding": True}
    assert score(r"\boxed{87.6\%}", truth) == RIGHT
    assert score(r"\boxed{87.6\%}", truth | {"ratio": False}) == WRONG


def test_json_is_read_like_the_fields():
    assert score(r"\boxed{ostholm | 2400}", json.dumps(TRUTH)) == RIGHT
    assert score(r"\boxed{ostholm | 2401}", json.dumps(TRUTH)) == WRONG


def test_ten_thousand_completions():
    generator = random.Random(0)
    pieces = ["ostholm", "2400", "2,400", " | ", "; ", ", ", " and ", "\\boxed{", "{", "}", "%", "$", "\\text{", "-",
              ".", "e9", "\n", "é", "<answer>", "9" * 50, "\0", "１", "\\", "million"]  # fmt: skip
    seen = set()
    for _ in range(10_000):
        text = "".join(generator.choices(pieces, k=generator.randrange(10)))
        if generator.random() < 0.5:
            text = f"\\boxed{{{text}}}"
        result = score(text)
        assert result.keys() == RIGHT.keys()
        assert result in (RIGHT, WRONG, NO_ANSWER)
        seen.add(tuple(result.values()))
    assert len(seen) == 3
