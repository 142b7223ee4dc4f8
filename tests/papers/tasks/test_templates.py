"""The prompt templates: what they render to and what they refuse.

Not covered: whether the wording equals the papers' beyond the parts quoted here.
"""

import hashlib

import pytest
from jinja2 import Template

from verl_clipx.papers.tasks.templates import (
    PLAIN_TEXT_CHAT_TEMPLATE,
    TEMPLATES,
    template_named,
)


def test_step_by_step_by_hand():
    (message,) = template_named("boxed_step_by_step").render(problem="What is $\\frac{1}{2}+1$?")
    assert message == {
        "role": "user",
        "content": "What is $\\frac{1}{2}+1$? Let's think step by step and output the final answer within \\boxed{}.",
    }


def test_every_letter_is_as_it_was():
    """Line ends and doubled blanks too: folding the lines of templates.yaml otherwise could lose them."""
    wording = repr([(template.name, template.messages) for template in TEMPLATES.values()])
    assert hashlib.sha256(wording.encode()).hexdigest()[:16] == "202b43d82d846738"


def test_r1_base_puts_the_problem_between_the_instruction_and_the_open_thinking():
    (message,) = template_named("r1_base").render(problem="{problem} stays")
    assert message["content"].startswith("A conversation between User and Assistant. The user asks")
    assert message["content"].endswith("by the \\boxed{} tag.\n{problem} stays\nAssistant: <think>")


def test_countdown_shows_the_numbers_as_a_list():
    for name in ("countdown_base", "countdown_base_boxed", "countdown_qwen_instruct"):
        (message,) = template_named(name).render(numbers=[3, 5, 2], target=16)
        assert "Using the numbers [3, 5, 2], create an equation that equals 16." in message["content"]
        assert message["content"].endswith("Let me solve this step by step.\n<think>")


def test_kk_chat_has_a_system_message():
    messages = template_named("kk_chat").render(problem="A very special island")
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"] == "A very special island\n"


@pytest.mark.parametrize("fields", [{}, {"problem": "a", "target": 1}, {"question": "a"}])
def test_wrong_fields_are_named(fields):
    with pytest.raises(ValueError, match=r"^template 'r1_base' takes the fields \['problem'\], not "):
        template_named("r1_base").render(**fields)


def test_unknown_template_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^prompt='r1' is not a template; there are r1_base, boxed_step_by_step"):
        template_named("r1")


def test_plain_text_chat_template_adds_nothing():
    messages = template_named("r1_base").render(problem="1+1?")
    assert Template(PLAIN_TEXT_CHAT_TEMPLATE).render(messages=messages) == messages[0]["content"]
