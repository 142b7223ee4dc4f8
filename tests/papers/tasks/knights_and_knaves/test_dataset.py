"""The rows, their wording in English and in compact form, and the papers' prompt.

Not covered: `clipx papers data build` around them (test_release.py goes through it); a training run; whether every way
of saying is pleasant English.
"""

import random
import re
from collections import Counter

import jinja2
import pytest

from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.knights_and_knaves import reward
from verl_clipx.papers.tasks.knights_and_knaves.dataset import rows
from verl_clipx.papers.tasks.knights_and_knaves.prompt import (
    QWEN_CHAT_TEMPLATE_WITH_THINK,
    build_compact_response,
    compact_puzzle,
)
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle
from verl_clipx.papers.tasks.knights_and_knaves.wording import word_puzzle, word_statement
from verl_clipx.papers.tasks.templates import template_named

# Puzzles by their number of people.
COUNTS = {
    ("knights_and_knaves", "train"): {3: 900, 4: 900, 5: 900, 6: 900, 7: 900},
    ("knights_and_knaves", "test"): {3: 100, 4: 100, 5: 100, 6: 100, 7: 100},
    ("knights_and_knaves_tiny", "train"): {2: 20, 3: 1000},
    ("knights_and_knaves_tiny", "test"): {2: 5, 3: 123},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["knights_and_knaves", "knights_and_knaves_tiny"])
def test_rows_ask_different_puzzles_whose_truths_earn_the_most(name):
    definition = definition_named(name)
    statements = []
    for split in definition.splits:
        rows_of_split = list(definition.rows(None, split=split, prompt=definition.prompts[0]))
        statements += [row["extra_info"]["statements"] for row in rows_of_split]
        counts = Counter(row["extra_info"]["people"] for row in rows_of_split)
        assert counts == COUNTS[name, split]
        # Sizes are mixed: each is among the first rows.
        assert {row["extra_info"]["people"] for row in rows_of_split[:100]} == set(counts)
        for index, row in enumerate(rows_of_split):
            extra_info = row["extra_info"]
            truth = row["reward_model"]["ground_truth"]
            assert row["data_source"] == "knights_and_knaves"
            assert extra_info["index"] == index
            assert extra_info["split"] == split
            names = [line.split()[1] for line in truth.splitlines()]
            assert len(names) == extra_info["people"]
            response = f"so</think><answer>{truth}</answer>"
            assert reward.compute_score(row["data_source"], response, truth)["score"] == 3.0
            if name == "knights_and_knaves_tiny":
                assert row["prompt"] == [{"role": "user", "content": extra_info["statements"]}]
            else:
                problem = row["prompt"][1]["content"].strip()
                assert row["prompt"] == template_named("kk_chat").render(problem=problem)
                assert f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}. " in problem
    assert len(set(statements)) == len(statements)


def test_seed_decides_the_rows():
    arguments = {"split": "test", "prompt": "kk_chat", "people": [3, 5], "count": 5}
    first = list(rows(None, seed=1, **arguments))
    assert Counter(row["extra_info"]["people"] for row in first) == {3: 5, 5: 5}
    assert list(rows(None, seed=1, **arguments)) == first
    assert list(rows(None, seed=2, **arguments)) != first


A = ("knight", 0)
B = ("knight", 1)
NOT_C = ("knave", 2)


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
        # A released statement may be deeper.
        (("not", ("and", A, B)), None, "!(A&B)"),
        (("or", ("and", A, B), NOT_C), None, "(A&B)|~C"),
        (("and", ("not", A), B), None, "(!A)&B"),
    ],
)
def test_statement(statement, english, compact):
    assert english is None or word_statement(statement, ["Ann", "Bob", "Cid"]) == english
    assert compact_puzzle([statement, NOT_C]) == f"A:{compact} B:~C"


def test_puzzle_in_english_has_the_published_frame_and_each_person_speaks_once_in_order():
    statements = (("or", A, NOT_C), *(("knight", person) for person in range(1, 7)))
    problem, names = word_puzzle(Puzzle(statements, (True,) * 7), random.Random(1))
    opening = (
        "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves "
        f"always lie. You meet 7 inhabitants: {', '.join(names[:-1])}, and {names[-1]}. "
    )
    assert problem.startswith(opening)
    assert problem.endswith(" So who is a knight and who is a knave?")
    sayings = problem.removeprefix(opening)
    assert word_statement(statements[0], names) in sayings
    # "X is a knight" names X, and so does the saying around it.
    names_after_the_first = re.findall("|".join(names), sayings)[-12:]
    assert names_after_the_first == [name for name in names[1:] for _ in range(2)]


def test_chat_prompt_and_compact_response_end_as_the_reward_expects():
    template = jinja2.Environment().from_string(QWEN_CHAT_TEMPLATE_WITH_THINK)
    messages = template_named("kk_chat").render(problem="Who is who?")
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant. The assistant first thinks about")
    assert text.endswith(
        "i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n<|im_end|>\n"
        "<|im_start|>user\nWho is who?\n<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert build_compact_response((True, False)) == "<think></think><answer>A is a knight\nB is a knave</answer>"
