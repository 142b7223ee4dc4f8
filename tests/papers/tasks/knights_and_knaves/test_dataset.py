"""The rows: schema, counts, determinism, and what verl's own dataset, reward loader and reward manager make of them.

Not covered: `clipx data build` around them; a training run.
"""

from collections import Counter

import pytest

from verl_clipx.papers.tasks.knights_and_knaves import reward
from verl_clipx.papers.tasks.knights_and_knaves.dataset import DATASETS, rows, tiny_rows
from verl_clipx.papers.tasks.knights_and_knaves.prompt import build_chat_prompt


@pytest.fixture(scope="module")
def paper():
    return {split: list(rows(None, split=split, prompt="kk_chat")) for split in ("train", "test")}


@pytest.fixture(scope="module")
def tiny():
    return {split: list(tiny_rows(None, split=split, prompt="kk_compact")) for split in ("train", "test")}


@pytest.mark.slow
def test_counts_of_the_papers(paper):
    for split, count in (("train", 900), ("test", 100)):
        people = Counter(row["extra_info"]["people"] for row in paper[split])
        assert people == dict.fromkeys((3, 4, 5, 6, 7), count)
        # Sizes are mixed: each is among the first rows.
        assert {row["extra_info"]["people"] for row in paper[split][:50]} == {3, 4, 5, 6, 7}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "tiny"])
def test_schema_and_solutions(name, request):
    for split, made in request.getfixturevalue(name).items():
        for index, row in enumerate(made):
            assert row.keys() == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert row["data_source"] == "knights_and_knaves"
            assert row["reward_model"]["style"] == "rule"
            assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (index, split)
            truth = row["reward_model"]["ground_truth"]
            assert len(truth.splitlines()) == row["extra_info"]["people"]
            response = f"so</think><answer>{truth}</answer>"
            assert reward.compute_score(row["data_source"], response, truth)["score"] == 3.0


@pytest.mark.parametrize("name", ["paper", "tiny"])
def test_no_two_rows_ask_the_same_and_the_splits_are_apart(name, request):
    made = request.getfixturevalue(name)
    asked = [row["extra_info"]["statements"] for split in made.values() for row in split]
    assert len(set(asked)) == len(asked)


def test_chat_prompt_is_made_of_the_problem(paper):
    for row in paper["test"]:
        problem = row["prompt"][1]["content"].strip()
        assert problem.startswith("A very special island")
        assert row["prompt"] == build_chat_prompt(problem)
        names = [line.split()[1] for line in row["reward_model"]["ground_truth"].splitlines()]
        assert f"You meet {len(names)} inhabitants: {', '.join(names[:-1])}, and {names[-1]}. " in problem


def test_compact_prompt_is_the_statements(tiny):
    for row in tiny["train"]:
        assert row["prompt"] == [{"role": "user", "content": row["extra_info"]["statements"]}]


def test_seed_decides_the_rows():
    arguments = {"split": "test", "prompt": "kk_chat", "people": [3, 5], "count": 5}
    first, again, other = (list(rows(None, seed=seed, **arguments)) for seed in (1, 1, 2))
    assert first == again != other
    assert Counter(row["extra_info"]["people"] for row in first) == {3: 5, 5: 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0 is below 1"),
        ({"people": [1]}, "people=1 "),
        ({"people": [2]}, "count=900 train puzzles of 2 people"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    arguments = {"source": None, "split": "train", "prompt": "kk_chat"} | arguments
    with pytest.raises(ValueError, match=f"^{message}"):
        list(rows(arguments.pop("source"), **arguments))


@pytest.mark.slow
def test_definitions_build_their_default_prompt(paper, tiny):
    assert [definition.name for definition in DATASETS] == ["knights_and_knaves", "knights_and_knaves_tiny"]
    for definition, made in zip(DATASETS, (paper, tiny), strict=True):
        assert definition.splits == ("train", "test")
        assert next(definition.rows(None, split="test", prompt=definition.prompts[0])) == made["test"][0]
