"""That the rewards which read an answer read it in the final part of a response, after the thinking.

Not covered: knights and knaves, whose form holds each tag once (its own tests).
"""

import pytest

from verl_clipx.papers.tasks.reward import compute_score


@pytest.mark.parametrize(
    ("data_source", "answer", "truth"),
    [
        ("countdown", "<answer>(3+5)*2</answer>", {"numbers": [3, 5, 2], "target": 16}),
        ("countdown_boxed", r"\boxed{(3+5)*2}", {"numbers": [3, 5, 2], "target": 16}),
        ("hitab", r"\boxed{7}", {"answers": ["7"], "ratio": False, "rounding": False}),
        ("math", r"\boxed{7}", "7"),
    ],
)
def test_an_answer_after_the_thinking_counts_and_one_in_it_does_not(data_source, answer, truth):
    outside = ("{}", "so {}", "so</think>{}", "<think>so</think> {}.", "<think>a</think>b<think>c</think>{}")
    inside = ("<think>{}", "<think>{}</think>", "perhaps {}</think> no", "a</think> b <think>{}")
    for text in outside + inside:
        score = float(text in outside)
        expected = {"score": score, "acc": score, "format": score}
        assert compute_score(data_source, text.format(answer), truth) == expected, text
