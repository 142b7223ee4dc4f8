"""Prompts for a puzzle: the papers' chat prompt, and a compact one for the tiny policy."""

from collections.abc import Sequence

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Statement
from verl_clipx.papers.tasks.templates import Messages

LETTERS = "ABCDEFGH"

_SIGNS = {"and": "&", "or": "|", "if": ">", "iff": "="}

QWEN_CHAT_TEMPLATE_WITH_THINK = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
"""Jinja chat template of Qwen2.5 that opens `<think>` for the policy, as Logic-RL's and AR-Lopti's prompts do.

Give it to verl as `actor_rollout_ref.model.custom_chat_template`, or save it in the tokenizer.
"""


def build_compact_prompt(statements: Sequence[Statement]) -> Messages:
    """Return one user message such as "A:B&~C B:A=C C:~A"; see `compact_puzzle`."""
    return [{"role": "user", "content": compact_puzzle(statements)}]


def build_compact_response(solution: Sequence[bool]) -> str:
    """Return the response to a compact prompt that gives a solution in the form that the reward reads.

    Its reasoning is empty, because a policy this small solves a puzzle without written reasoning or not at all.
    """
    kinds = (
        f"{letter} is a {'knight' if is_knight else 'knave'}"
        for letter, is_knight in zip(LETTERS, solution, strict=False)
    )
    return f"<think></think><answer>{chr(10).join(kinds)}</answer>"


def compact_puzzle(statements: Sequence[Statement]) -> str:
    """Write what each of at most 8 people says, such as "A:B&~C B:A=C C:~A".

    A letter stands for "is a knight", and with ~ before it for "is a knave". ! stands for "not", & for "and", | for
    "or", > for "if … then", and = for "if and only if".
    """
    return " ".join(f"{letter}:{_write(statement)}" for letter, statement in zip(LETTERS, statements, strict=False))


def _write(statement: Statement) -> str:
    match statement:
        case ("knight", person):
            return LETTERS[person]
        case ("knave", person):
            return f"~{LETTERS[person]}"
    operator, *parts = statement
    texts = [_write(part) if part[0] in ("knight", "knave") else f"({_write(part)})" for part in parts]
    return f"!{texts[0]}" if operator == "not" else _SIGNS[operator].join(texts)
