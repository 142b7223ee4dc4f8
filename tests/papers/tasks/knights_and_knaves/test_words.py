"""Words of AR-Lopti's Table 5, counted by hand in short responses, and in long ones fast.

Whether the paper counts the same way is not known: it says frequency.
"""

import time

import pytest

from verl_clipx.papers.tasks.knights_and_knaves import reward
from verl_clipx.papers.tasks.knights_and_knaves.words import CATEGORIES, check_ground_truth, compute_score

TRUTH = "(1) Zoey is a knight"


def counts(text: str) -> dict[str, int]:
    """The categories that the text has words of."""
    found = compute_score("knights_and_knaves", text, TRUTH, extra_info={})
    return {name: int(found[name]) for name in CATEGORIES if found[name]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Analyze it. We considered, looked at and CHECKED it; examine", {"analysis": 5}),
        ("Reconsider, checking, analyzes, look up", {}),
        ("Zoey's statement and Liam\u2019s statements, James' statement, but this statement", {"statement": 3}),
        ("Since A, because B, due to C, given that D", {"causal_indicator": 4}),
        ("So. Thus; hence, as a result: consequently, therefore", {"conclusion_indicator": 6}),
        ("Also, soon", {}),
        ("Assume A. I assumed B. If C is a knave, then D is. If E\nthen F. If G. Then H", {"assumption": 3}),
        ("He must be one, a definite one, definitely", {"assertion": 2}),
    ],
)
def test_words_by_hand(text, expected):
    assert counts(text) == expected


def test_the_rewards_own_parts_stay():
    text = "So</think><answer>Zoey is a knight</answer>"
    parts = reward.compute_score("knights_and_knaves", text, TRUTH)
    assert parts["acc"] == 1.0 and parts.items() <= compute_score("knights_and_knaves", text, TRUTH).items()
    assert check_ground_truth is reward.check_ground_truth


def test_long_responses_take_no_time():
    started = time.process_time()
    compute_score("knights_and_knaves", "if " * 10_000 + "a's " * 10_000, TRUTH)
    # Ample for one pass on a busy machine.
    assert time.process_time() - started < 10
