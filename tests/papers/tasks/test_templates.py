"""The prompt templates: their wording, what they render to and what they refuse.

Not covered: whether the wording equals the papers' beyond what stood here before.
"""

import hashlib

import pytest
from jinja2 import Template

from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE, TEMPLATES, template_named


def test_every_letter_is_as_it_was():
    """Line ends and doubled blanks too: folding the lines of templates.yaml otherwise could lose them."""
    wording = repr([(template.name, template.messages) for template in TEMPLATES.values()])
    assert hashlib.sha256(wording.encode()).hexdigest()[:16] == "202b43d82d846738"


@pytest.mark.parametrize(
    ("name", "fields", "roles", "ends"),
    [
        ("r1_base", {"problem": "{problem}"}, ["user"], "by the \\boxed{} tag.\n{problem}\nAssistant: <think>"),
        (
            *("countdown_base", {"numbers": [3, 5], "target": 16}, ["user"]),
            "\nAssistant: Let me solve this step by step.\n<think>",
        ),
        ("kk_chat", {"problem": "A very special island"}, ["system", "user"], "A very special island\n"),
    ],
)
def test_rendering(name, fields, roles, ends):
    messages = template_named(name).render(**fields)
    assert [message["role"] for message in messages] == roles and messages[-1]["content"].endswith(ends)
    assert name != "countdown_base" or "Using the numbers [3, 5], create an equation that equals 16." in str(messages)
    texts = "".join(message["content"] for message in messages)
    assert Template(PLAIN_TEXT_CHAT_TEMPLATE, keep_trailing_newline=True).render(messages=messages) == texts


@pytest.mark.parametrize("fields", [{}, {"problem": "a", "target": 1}, {"question": "a"}])
def test_wrong_fields_and_names_are_named(fields):
    with pytest.raises(ValueError, match=r"^template 'r1_base' takes the fields \['problem'\], not "):
        template_named("r1_base").render(**fields)
    with pytest.raises(ValueError, match=r"^prompt='r1' is not a template; there are r1_base, boxed_step_by_step"):
        template_named("r1")
