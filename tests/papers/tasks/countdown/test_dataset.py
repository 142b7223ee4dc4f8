"""Countdown's rows: generated ones through `clipx papers data build`, and the public set from a handmade local copy.

Not covered: the hub itself (a stand-in checks what would be asked of it); its real 490,364 problems; a training run.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.countdown_files import write_countdown
from verl_clipx.papers.tasks.countdown.dataset import PROMPTS, build_prompt, generated_rows, public_rows
from verl_clipx.papers.tasks.reward import compute_score

FIXTURE = Path(__file__).parent / "fixtures" / "countdown_3to4.jsonl"


def read_truth(row):
    return json.loads(row["reward_model"]["ground_truth"])


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_seed_decides_the_rows(tmp_path, split):
    first = write_countdown(tmp_path / "first", 40, 20, 3)[split]
    repeated = write_countdown(tmp_path / "repeated", 40, 20, 3)[split]
    of_another_seed = write_countdown(tmp_path / "another", 40, 20, 4)[split]
    assert repeated.read_bytes() == first.read_bytes()
    assert pq.read_table(of_another_seed) != pq.read_table(first)


def test_generated_rows_ask_for_what_their_solutions_earn_and_no_problem_is_in_both_splits(tmp_path):
    files = write_countdown(tmp_path, 40, 20, 3)
    prompts = {}
    for split, size in (("train", 40), ("test", 20)):
        rows = pq.read_table(files[split]).to_pylist()
        prompts[split] = {str(row["prompt"]) for row in rows}
        assert len(rows) == len(prompts[split]) == size
        for index, row in enumerate(rows):
            truth = read_truth(row)
            assert row["prompt"] == build_prompt(truth["numbers"], truth["target"])
            assert row["extra_info"]["index"] == index
            assert row["extra_info"]["split"] == split
            answer = f"<answer>{row['extra_info']['solution']}</answer>"
            assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == 1.0
    assert not prompts["train"] & prompts["test"]


def test_options_reach_the_generator():
    rows = list(generated_rows(None, split="train", prompt=PROMPTS[0], size=20, max_value=9, max_numbers=4))
    assert len(rows) == 20
    assert all(max(read_truth(row)["numbers"]) <= 9 for row in rows)


def test_the_test_split_has_256_rows_by_default():
    assert len(list(generated_rows(None, split="test", prompt=PROMPTS[0]))) == 256


def test_the_compact_prompt_by_hand():
    assert build_prompt([13, 2, 5], 21) == [{"role": "user", "content": "13 2 5 = 21"}]


def test_the_public_splits_take_the_first_and_the_next_problems():
    arguments = {"prompt": "countdown_base", "train_size": 4, "test_size": 2}
    train = list(public_rows(FIXTURE, split="train", **arguments))
    test = list(public_rows(FIXTURE, split="test", **arguments))
    assert [read_truth(row)["target"] for row in train] == [16, 98, 24, 16]
    assert [read_truth(row)["target"] for row in test] == [77, 60]
    assert train[1] == {
        "data_source": "countdown",
        "prompt": build_prompt([44, 19, 35], 98, "countdown_base"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": '{"numbers": [44, 19, 35], "target": 98}'},
        "extra_info": {"index": 1, "split": "train"},
    }


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_reward_of_a_rows_data_source_reads_what_the_prompt_asks_for(prompt):
    (row,) = public_rows(FIXTURE, split="train", prompt=prompt, train_size=1, test_size=1)
    truth = row["reward_model"]["ground_truth"]
    score_in_box = compute_score(row["data_source"], r"\boxed{(3+5)*2}", truth)["score"]
    score_in_tags = compute_score(row["data_source"], "<answer>(3+5)*2</answer>", truth)["score"]
    if "boxed" in str(row["prompt"]):
        assert (score_in_box, score_in_tags) == (1.0, 0.0)
    else:
        assert (score_in_box, score_in_tags) == (0.0, 1.0)
