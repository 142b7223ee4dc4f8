r"""Finding the last \boxed{…}: braces, escapes, hostile text.

Not covered: what the answer means; each task's reward tests do that.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.common.responses import last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{5} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{\\}", r"\\"),
        (r"\boxed{5", None),
        (r"\boxed{5} then \boxed{6", None),  # cut off: the last one counts, and it has no end
        (r"\boxed 5", None),
        (r"boxed{5}", None),
        ("", None),
        (None, None),
        (b"\\boxed{5}", None),
    ],
)
def test_by_hand(text, expected):
    assert last_boxed(text, 100) == expected


def test_length_bound_is_exact():
    assert last_boxed("\\boxed{" + "1" * 10 + "}", 10) == "1" * 10
    assert last_boxed("\\boxed{" + "1" * 11 + "}", 10) is None


@given(st.text(alphabet="ab{}\\ boxed", max_size=60))
def test_never_raises_and_what_it_finds_stands_in_the_text(text):
    found = last_boxed(text, 20)
    assert found is None or ("\\boxed{" + found + "}" in text and len(found) <= 20)


@given(st.text(alphabet=st.characters(exclude_characters="\\{}", exclude_categories=["Cs"]), max_size=50))
def test_finds_what_was_put_in(content):
    assert last_boxed(f"first \\boxed{{no}} then \\boxed{{{content}}} end", 50) == content
