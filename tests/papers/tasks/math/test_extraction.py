r"""The last box of the final part: hand-made responses, cut-off ones, hedging ones.

Not covered: whether the answer is right (test_reward.py).
"""

import pytest

from verl_clipx.papers.tasks.math.extraction import MAX_ANSWER_LENGTH, MAX_BOXES, extract_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{5}.", "5"),
        (r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"guess \boxed{1}</think><answer>\boxed{2}</answer>", "2"),
        (r"<think>a</think> b <think>c</think> \boxed{4}", "4"),
        (r"\boxed{5}, which is in \boxed as asked.", "5"),
        (r"\boxed{5}. So $\boxed 5$", "5"),
    ],
)
def test_the_last_closed_box(response, answer):
    extraction = extract_answer(response)
    assert extraction.answer == answer
    assert extraction.finished


@pytest.mark.parametrize(
    ("response", "finished"),
    [
        ("", True),
        ("the answer is 5", True),
        (r"\boxed{}", True),
        (r"\boxed{  }", True),
        (r"<think>\boxed{5}</think> five", True),  # a box inside the thinking is not an answer
        (r"\boxed{5", False),
        (r"\boxed{5} no, \boxed{6", False),  # the last one counts, and it was cut off
        (r"\boxed", False),
        (r"\boxed 5", True),  # a box without a brace is none, and nothing was cut off
        (r"$\boxed 5$", True),
        (r"I can't put it in a \boxed command.", True),
        (r"\boxed{\}", False),  # the brace that would close it is escaped
        (r"\boxed{5\\", False),
        (r"<think> 5 \boxed{5}", False),
        (r"<think>a</think> wait <think> \boxed{5}", False),
    ],
)
def test_no_answer(response, finished):
    extraction = extract_answer(response)
    assert extraction.answer is None
    assert extraction.finished is finished
    assert not extraction.consistent


@pytest.mark.parametrize(
    ("response", "consistent"),
    [
        (r"\boxed{5}", True),
        (r"\boxed{5} or again \boxed{ 5 }", True),
        (r"\boxed{4} \boxed{5}", False),
        (r"\boxed{ \boxed{5", False),
        (r"<think>\boxed{4}</think> \boxed{5}", True),  # the thinking may try things out
        (r"\boxed{5}, in \boxed as asked", True),
        (r"\boxed{5}" * MAX_BOXES, True),
        (r"\boxed{5}" * (MAX_BOXES + 1), False),
    ],
)
def test_consistent_boxes(response, consistent):
    assert extract_answer(response).consistent is consistent


def test_an_answer_has_a_bounded_length():
    assert extract_answer(rf"\boxed{{{'1' * MAX_ANSWER_LENGTH}}}").answer == "1" * MAX_ANSWER_LENGTH
    assert extract_answer(rf"\boxed{{{'1' * (MAX_ANSWER_LENGTH + 1)}}}").answer is None
