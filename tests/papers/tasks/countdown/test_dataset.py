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


def truth_of(row):
    return json.loads(row["reward_model"]["ground_truth"])


def test_rows_of_a_seed(tmp_path):
    files, again, other = (write_countdown(tmp_path / str(name), 40, 20, seed) for name, seed in enumerate((3, 3, 4)))
    asked = {}
    for split, size in (("train", 40), ("test", 20)):
        assert again[split].read_bytes() == files[split].read_bytes()
        assert pq.read_table(other[split]) != pq.read_table(files[split])
        rows = pq.read_table(files[split]).to_pylist()
        asked[split] = {str(row["prompt"]) for row in rows}
        assert len(rows) == len(asked[split]) == size
        for index, row in enumerate(rows):
            assert row["prompt"] == build_prompt(truth_of(row)["numbers"], truth_of(row)["target"])
            assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (index, split)
            answer = f"<answer>{row['extra_info']['solution']}</answer>"
            assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == 1.0
    assert not asked["train"] & asked["test"]
    rows = generated_rows(None, split="train", prompt=PROMPTS[0], size=20, max_value=9, max_numbers=4)
    assert {max(truth_of(row)["numbers"]) <= 9 for row in rows} == {True}
    assert len(list(generated_rows(None, split="test", prompt=PROMPTS[0]))) == 256
    assert build_prompt([13, 2, 5], 21) == [{"role": "user", "content": "13 2 5 = 21"}]


def test_the_public_splits_take_the_first_and_the_next_problems():
    train, test = (
        list(public_rows(FIXTURE, split=split, prompt="countdown_base", train_size=4, test_size=2))
        for split in ("train", "test")
    )
    assert [truth_of(row)["target"] for row in train] == [16, 98, 24, 16]
    assert [truth_of(row)["target"] for row in test] == [77, 60]
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
    boxed = "boxed" in str(row["prompt"])
    right, other = r"\boxed{(3+5)*2}", "<answer>(3+5)*2</answer>"
    for answer, score in ((right, float(boxed)), (other, float(not boxed))):
        assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == score
