"""Prompts for a puzzle: the papers' chat prompt, and a compact one for the tiny policy."""

from collections.abc import Sequence

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import LEAVES, OPERATORS, Statement
from verl_clipx.papers.tasks.templates import Messages

LETTERS = "ABCDEFGH"

# The signs between two statements in compact notation.
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
    lines = []
    # There may be fewer people than letters.
    for letter, is_knight in zip(LETTERS, solution, strict=False):
        kind = "knight" if is_knight else "knave"
        lines.append(f"{letter} is a {kind}")
    answer = "\n".join(lines)
    return f"<think></think><answer>{answer}</answer>"


def compact_puzzle(statements: Sequence[Statement]) -> str:
    """Return what each of at most 8 people says, such as "A:B&~C B:A=C C:~A".

    A letter stands for "is a knight", and with ~ before it for "is a knave". ! stands for "not", & for "and", | for
    "or", > for "if … then", and = for "if and only if".
    """
    # There may be fewer people than letters.
    pairs = zip(LETTERS, statements, strict=False)
    return " ".join(f"{letter}:{_spell_statement(statement)}" for letter, statement in pairs)


def _spell_statement(statement: Statement) -> str:
    """Return a statement in the signs of `compact_puzzle`, such as B&~C."""
    match statement:
        case ("knight", person):
            return LETTERS[person]
        case ("knave", person):
            return f"~{LETTERS[person]}"
        case ("not", inner):
            return f"!{_spell_part(inner)}"
        case (operator, left, right):
            return f"{_spell_part(left)}{_SIGNS[operator]}{_spell_part(right)}"
    raise ValueError(f"statement={statement!r} has an unknown form; use one of {LEAVES + OPERATORS}")


def _spell_part(statement: Statement) -> str:
    """Return a statement inside another one. If it has an operator, it is put in brackets."""
    text = _spell_statement(statement)
    is_leaf = statement[0] in LEAVES
    return text if is_leaf else f"({text})"
