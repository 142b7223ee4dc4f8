"""The public Countdown set and the generated one through their definitions, on a handmade local copy.

Not covered: the hub itself (a stand-in checks what would be asked of it); its real 490,364 problems.
"""

import json
from pathlib import Path

import pytest

from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.countdown.boxed_reward import compute_score as compute_boxed_score
from verl_clipx.papers.tasks.countdown.dataset import DATASETS, generated_rows, public_rows
from verl_clipx.papers.tasks.countdown.prompt import PROMPTS, build_prompt
from verl_clipx.papers.tasks.countdown.reward import compute_score

FIXTURE = Path(__file__).parent / "fixtures" / "countdown_3to4.jsonl"
SIZES = {"train_size": 4, "test_size": 2}


def truth_of(row):
    return json.loads(row["reward_model"]["ground_truth"])


def test_splits_take_the_first_and_the_next_problems():
    train = list(public_rows(FIXTURE, split="train", prompt="countdown_base", **SIZES))
    test = list(public_rows(FIXTURE, split="test", prompt="countdown_base", **SIZES))
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
    boxed = row["data_source"] == "countdown_boxed"
    assert boxed == ("boxed" in str(row["prompt"]))
    reward, answer = (compute_boxed_score, r"\boxed{(3+5)*2}") if boxed else (compute_score, "<answer>(3+5)*2</answer>")
    assert reward(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == 1.0


def test_too_short_a_copy_is_refused():
    with pytest.raises(ValueError, match=r"test: only 1 of 2 problems from number 5 on"):
        list(public_rows(FIXTURE, split="test", prompt="countdown_base", train_size=5, test_size=2))


@pytest.mark.parametrize("record", ['{"target": "16", "nums": [1]}', '{"target": 16, "nums": "1"}', '{"answer": 1}'])
def test_records_of_another_kind_are_refused(tmp_path, record):
    (tmp_path / "data.jsonl").write_text(record + "\n")
    with pytest.raises(ValueError, match=r"record 0: fields .* it must have an integer 'target' and a list 'nums'"):
        list(public_rows(tmp_path, split="train", prompt="countdown_base", train_size=1))


def test_without_a_local_copy_the_hub_is_asked(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or [{"target": 3, "nums": [3]}])
    rows = list(public_rows(None, split="train", prompt="countdown_base", train_size=1))
    assert asked == [(("Jiayi-Pan/Countdown-Tasks-3to4", None), {"split": "train"})]
    assert truth_of(rows[0]) == {"numbers": [3], "target": 3}


def test_generated_rows_follow_their_options():
    options = {"size": 20, "seed": 3, "max_value": 9, "max_numbers": 4}
    train = list(generated_rows(None, split="train", prompt=PROMPTS[0], **options))
    test = list(generated_rows(None, split="test", prompt=PROMPTS[0], **options))
    assert len(train) == len(test) == 20
    assert max(max(truth_of(row)["numbers"]) for row in train + test) <= 9
    problems = [{str(row["prompt"]) for row in rows} for rows in (train, test)]
    assert not problems[0] & problems[1]


@pytest.mark.parametrize("name", ["countdown", "knights_and_knaves_tiny", "reversal", "sums"])
def test_generated_problems_take_no_local_copy(name, tmp_path):
    with pytest.raises(ValueError, match=rf"the problems of {name} are generated; leave out --from"):
        build_split(definition_named(name), tmp_path, split="train", source=FIXTURE)


def test_definitions_name_both():
    assert [(d.name, d.prompts[0], d.splits) for d in DATASETS] == [
        ("countdown", "countdown_compact", ("train", "test")),
        ("countdown_3to4", "countdown_base", ("train", "test")),
    ]
