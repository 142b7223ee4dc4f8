"""The data sets of reasoning-gym through `clipx data`: rows, seeds, splits without overlap, settings that do not fit.

Not covered: reasoning-gym's own generators; how hard the tasks are for a model (docs/tasks/reasoning_gym.md has that).
"""

import json
import re
import sys

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.papers.tasks.reasoning_gym.dataset import TASKS
from verl_clipx.papers.tasks.reasoning_gym.generator import split_of
from verl_clipx.papers.tasks.reasoning_gym.reward import check_ground_truth, compute_score

NAMES = [task.name for task in TASKS]
SIZE = 24


def build(name, out, *options, **flags):
    """Runs `clipx data build`; its exit code and all that it printed."""
    words = [
        "data",
        "build",
        name,
        "--out",
        str(out),
        *(word for flag in flags.items() for word in (f"--{flag[0]}", flag[1])),
    ]
    words += [word for option in options for word in ("--option", option)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, words)
    return result.exit_code, result.output


def rows_of(folder, split):
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


@pytest.fixture(scope="module", params=NAMES)
def built(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    code, output = build(request.param, folder, f"size={SIZE}")
    assert code == 0, output
    return request.param, folder


def test_rows_ask_for_the_answer_only_and_their_own_is_right(built):
    name, folder = built
    for split in ("train", "test"):
        rows = rows_of(folder, split)
        assert len(rows) == SIZE
        for index, row in enumerate(rows):
            system, *_, question = row["prompt"]
            assert (system["role"], question["role"]) == ("system", "user")
            assert re.fullmatch(r"Answer with the \w+ only\.", system["content"])
            assert row["data_source"] == name and row["extra_info"] == {"index": index, "split": split}
            truth = row["reward_model"]["ground_truth"]
            check_ground_truth(name, truth)
            right = compute_score(name, json.loads(truth)["answer"], truth)
            assert right == {"score": 1.0, "acc": 1.0, "format": 1.0, "skill": 1.0}


def test_no_problem_is_in_both_splits_whatever_the_seed_and_the_order_of_its_numbers(built, tmp_path):
    name, folder = built
    code, output = build(name, tmp_path, f"size={SIZE}", "seed=1")
    assert code == 0, output

    def problems(split):
        found = [row["prompt"][-1]["content"] for one in (folder, tmp_path) for row in rows_of(one, split)]
        return {tuple(sorted(re.findall(r"\w+|[^\w\s]", text.casefold()))) for text in found}

    train, test = problems("train"), problems("test")
    assert not train & test and min(len(train), len(test)) >= SIZE
    assert rows_of(folder, "train") != rows_of(tmp_path, "train")


def test_the_same_seed_draws_the_same_problems(built, tmp_path):
    name, folder = built
    code, output = build(name, tmp_path, f"size={SIZE}")
    assert code == 0, output
    for split in ("train", "test"):
        assert rows_of(folder, split) == rows_of(tmp_path, split)


def test_the_order_of_a_sum_is_no_other_problem():
    splits = {(first, second): split_of(f"Add {first} + {second}.") for first in range(20) for second in range(20)}
    assert set(splits.values()) == {"train", "test"}
    assert all(split == splits[second, first] for (first, second), split in splits.items())
    assert split_of("What is 3 + 14?") == split_of("what is 14 + 3 ?")


def test_a_prompt_shows_one_solved_problem_which_is_in_neither_split(tmp_path):
    # Of 110 sums and differences up to their order every one that is left is drawn.
    for split, size in (("train", 100), ("test", 9)):
        code, output = build(
            "reasoning_gym_chain_sum", tmp_path, f"size={size}", 'settings={"max_terms": 2}', split=split
        )
        assert code == 0, output
    prompts = [row["prompt"] for split in ("train", "test") for row in rows_of(tmp_path, split)]
    (shown,) = {(example["content"], result["content"]) for _, example, result, _ in prompts}
    assert shown[0].endswith(" =") and re.fullmatch(r"-?\d+", shown[1])

    def terms(question):
        return tuple(sorted(re.findall(r"\d+|[+-]", question)))

    problems = {terms(prompt[-1]["content"]) for prompt in prompts}
    assert len(problems) == 109 and terms(shown[0]) not in problems


def test_a_prompt_without_it(tmp_path):
    code, output = build("reasoning_gym_chain_sum", tmp_path, "size=8", prompt="reasoning_short")
    assert code == 0, output
    assert [one["role"] for one in rows_of(tmp_path, "train")[0]["prompt"]] == ["system", "user"]


def test_harder_problems_by_their_generators_settings(tmp_path):
    code, output = build("reasoning_gym_chain_sum", tmp_path, "size=8", 'settings={"min_digits": 4, "max_digits": 4}')
    assert code == 0, output
    (question, *_) = [row["prompt"][-1]["content"] for row in rows_of(tmp_path, "train")]
    assert re.search(r"\d{4} [+-] \d{4}", question)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (['settings={"digits": 3}'], "settings={.*'digits': 3.* are not valid for reasoning-gym's chain_sum: .*digits"),
        (
            ['settings={"min_digits": 9}'],
            "reasoning-gym's chain_sum: max_digits must be >= min_digits",
        ),
        (["size=0"], "size=0 is below 1"),
        (["size=20", "seed=-1"], "seed=-1 is below 0"),
        # 110 sums and differences up to their order.
        (
            ["size=150", 'settings={"max_terms": 2}'],
            r"has only \d+ different problems in the split 'train' \(of 8000 drawn\)",
        ),
        (["settings=3"], "option settings=3 of reasoning_gym_chain_sum is not of the type dict"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, options, message):
    code, output = build("reasoning_gym_chain_sum", tmp_path, *options)
    assert code == 1 and re.search(message, output.replace("\n", " ")), output
    assert not list(tmp_path.glob("*.parquet"))


def test_without_the_package_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    code, output = build("reasoning_gym_chain_sum", tmp_path)
    assert code == 1 and "needs reasoning-gym: pip install 'verl-clipx[reasoning]'" in output
