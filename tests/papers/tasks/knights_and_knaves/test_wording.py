"""English and compact wording, and the prompts: expected texts by hand.

Not covered: whether every way of saying is pleasant English.
"""

import random
import re

import jinja2
import pytest

from verl_clipx.papers.tasks.knights_and_knaves.generator import generate_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.prompt import (
    QWEN_CHAT_TEMPLATE_WITH_THINK,
    build_chat_prompt,
    build_compact_prompt,
    build_compact_response,
    compact_puzzle,
)
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle
from verl_clipx.papers.tasks.knights_and_knaves.statement import OPERATORS
from verl_clipx.papers.tasks.knights_and_knaves.wording import (
    NAMES,
    SAYINGS,
    word_puzzle,
    word_solution,
    word_statement,
)

A, B, NOT_C = ("knight", 0), ("knight", 1), ("knave", 2)


@pytest.mark.parametrize(
    ("statement", "english", "compact"),
    [
        (A, "Ann is a knight", "A"),
        (NOT_C, "Cid is a knave", "~C"),
        (("not", A), "Ann is not a knight", "!A"),
        (("not", NOT_C), "Cid is not a knave", "!~C"),
        (("and", A, NOT_C), "Ann is a knight and Cid is a knave", "A&~C"),
        (("or", A, B), "Ann is a knight or Bob is a knight", "A|B"),
        (("if", A, B), "If Ann is a knight then Bob is a knight", "A>B"),
        (("iff", A, B), "Ann is a knight if and only if Bob is a knight", "A=B"),
    ],
)
def test_statement(statement, english, compact):
    assert word_statement(statement, ["Ann", "Bob", "Cid"]) == english
    assert compact_puzzle([statement]) == f"A:{compact}"


@pytest.mark.parametrize(
    ("statement", "compact"),
    [
        (("not", ("and", A, B)), "!(A&B)"),
        (("or", ("and", A, B), NOT_C), "(A&B)|~C"),
        (("and", ("not", A), B), "(!A)&B"),
    ],
)
def test_a_released_statement_may_be_deeper(statement, compact):
    assert compact_puzzle([statement]) == f"A:{compact}"


def test_puzzle_in_english_has_the_published_frame():
    (puzzle,) = generate_puzzles(3, 1, 0, "train", OPERATORS)
    problem, names = word_puzzle(puzzle, random.Random(5))
    first, second, third = names
    opening = (
        "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves "
        f"always lie. You meet 3 inhabitants: {first}, {second}, and {third}. "
    )
    assert problem.startswith(opening)
    assert problem.endswith(" So who is a knight and who is a knave?")
    said = problem.removeprefix(opening)
    for statement in puzzle.statements:
        assert word_statement(statement, names) in said


def test_each_person_speaks_once_in_order():
    statements = tuple(("knight", person) for person in range(7))
    problem, names = word_puzzle(Puzzle(statements, (True,) * 7), random.Random(1))
    said = problem.split("inhabitants: ")[1].split(". ", 1)[1]
    # "X is a knight" names X, and so does the saying around it.
    assert re.findall("|".join(names), said) == [name for name in names for _ in range(2)]


def test_names_and_sayings_are_distinct_and_whole():
    assert len(set(NAMES)) == len(NAMES) >= 50
    assert len(set(SAYINGS)) == len(SAYINGS)
    assert all(saying.count("{name}") == saying.count("{statement}") == 1 for saying in SAYINGS)
    # The reward reads a name as one word of letters.
    assert all(re.fullmatch(r"[A-Z][a-z]+", name) for name in NAMES)


def test_solution():
    assert word_solution((True, False), ("Zoey", "Liam")) == "(1) Zoey is a knight\n(2) Liam is a knave"
    assert build_compact_response((True, False)) == ("<think></think><answer>A is a knight\nB is a knave</answer>")


def test_compact_prompt():
    statements = (("and", ("knight", 1), ("knave", 2)), ("iff", ("knight", 0), ("knight", 2)), ("knave", 0))
    assert build_compact_prompt(statements) == [{"role": "user", "content": "A:B&~C B:A=C C:~A"}]


def test_chat_prompt_ends_as_the_papers_does():
    template = jinja2.Environment().from_string(QWEN_CHAT_TEMPLATE_WITH_THINK)
    text = template.render(messages=build_chat_prompt("Who is who?"), add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant. The assistant first thinks about")
    assert text.endswith(
        "i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n<|im_end|>\n"
        "<|im_start|>user\nWho is who?\n<|im_end|>\n<|im_start|>assistant\n<think>"
    )
