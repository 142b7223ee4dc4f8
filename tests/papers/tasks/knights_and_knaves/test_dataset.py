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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tiny"), [("knights_and_knaves", False), ("knights_and_knaves_tiny", True)])
def test_rows(name, tiny):
    definition, asked = definition_named(name), []
    for split in definition.splits:
        made_rows = list(definition.rows(None, split=split, prompt=definition.prompts[0]))
        asked += [row["extra_info"]["statements"] for row in made_rows]
        counts = Counter(row["extra_info"]["people"] for row in made_rows)
        papers = dict.fromkeys((3, 4, 5, 6, 7), 900 if split == "train" else 100)
        assert counts == (papers if not tiny else {2: 20, 3: 1000} if split == "train" else {2: 5, 3: 123})
        # Sizes are mixed: each is among the first rows.
        assert {row["extra_info"]["people"] for row in made_rows[:100]} == set(counts)
        for index, row in enumerate(made_rows):
            about, truth = row["extra_info"], row["reward_model"]["ground_truth"]
            assert (row["data_source"], about["index"], about["split"]) == ("knights_and_knaves", index, split)
            names = [line.split()[1] for line in truth.splitlines()]
            assert len(names) == about["people"]
            response = f"so</think><answer>{truth}</answer>"
            assert reward.compute_score(row["data_source"], response, truth)["score"] == 3.0
            if tiny:
                assert row["prompt"] == [{"role": "user", "content": about["statements"]}]
            else:
                problem = row["prompt"][1]["content"].strip()
                assert row["prompt"] == template_named("kk_chat").render(problem=problem)
                assert f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}. " in problem
    assert len(set(asked)) == len(asked)


def test_seed_decides_the_rows():
    arguments = {"split": "test", "prompt": "kk_chat", "people": [3, 5], "count": 5}
    first, again, other = (list(rows(None, seed=seed, **arguments)) for seed in (1, 1, 2))
    assert first == again != other
    assert Counter(row["extra_info"]["people"] for row in first) == {3: 5, 5: 5}


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
    assert problem.startswith(opening) and problem.endswith(" So who is a knight and who is a knave?")
    said = problem.removeprefix(opening)
    assert word_statement(statements[0], names) in said
    # "X is a knight" names X, and so does the saying around it.
    after_the_first = re.findall("|".join(names), said)[-12:]
    assert after_the_first == [name for name in names[1:] for _ in range(2)]


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
