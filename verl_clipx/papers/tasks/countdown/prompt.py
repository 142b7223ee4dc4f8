"""The chat prompt of a Countdown problem, and a response that answers it."""

from collections.abc import Sequence

from verl_clipx.papers.tasks.templates import Messages, template_named

COMPACT = "countdown_compact"
BOXED = "countdown_base_boxed"
PROMPTS = (COMPACT, "countdown_base", BOXED, "countdown_qwen_instruct")


def build_prompt(numbers: Sequence[int], target: int, template: str = COMPACT) -> Messages:
    """Return the chat messages of one problem.

    The compact template, such as "2 3 5 = 16", is for a policy of about a million parameters. The others are the
    papers'.
    """
    shown = " ".join(map(str, numbers)) if template == COMPACT else list(map(int, numbers))
    return template_named(template).render(numbers=shown, target=target)


def build_response(expression: str) -> str:
    """Return a response that gives an expression as its answer, in the form that the reward reads."""
    return f"<answer>{expression}</answer>"
