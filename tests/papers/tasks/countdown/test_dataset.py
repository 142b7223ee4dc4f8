"""The Parquet files: columns, determinism, and what verl's own dataset, reward loader and reward manager make of them.

Not covered: a training run.
"""

import asyncio
import json

import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.countdown_files import write_countdown
from verl_clipx.papers.tasks.commands import app
from verl_clipx.papers.tasks.countdown import reward
from verl_clipx.papers.tasks.countdown.prompt import build_prompt, build_response
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_countdown(tmp_path_factory.mktemp("countdown"), 40, 20, seed=3)


def test_columns_and_sizes(files):
    for split, size in (("train", 40), ("test", 20)):
        rows = pq.read_table(files[split]).to_pylist()
        assert len(rows) == size
        for index, row in enumerate(rows):
            truth = row["reward_model"]["ground_truth"]
            assert row["data_source"] == "countdown"
            problem = json.loads(truth)
            assert row["prompt"] == build_prompt(problem["numbers"], problem["target"])
            assert row["reward_model"]["style"] == "rule"
            assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (index, split)
            answer = build_response(row["extra_info"]["solution"])
            assert reward.compute_score(row["data_source"], answer, truth)["score"] == 1.0


def test_prompt_and_response_by_hand():
    assert build_prompt([13, 2, 5], 21) == [{"role": "user", "content": "13 2 5 = 21"}]
    assert build_response("13+2*5-2") == "<answer>13+2*5-2</answer>"


def test_same_seed_same_content_and_no_partial_file_left(files, tmp_path):
    again = write_countdown(tmp_path, 40, 20, seed=3)
    other = write_countdown(tmp_path / "other", 40, 20, seed=4)
    for split in ("train", "test"):
        assert again[split].read_bytes() == files[split].read_bytes()
        assert pq.read_table(other[split]) != pq.read_table(files[split])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "test.parquet", "train.parquet"]


def load_with_verl(path, max_prompt_length, cache):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create(
        {
            "cache_dir": str(cache),
            "prompt_key": "prompt",
            "max_prompt_length": max_prompt_length,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": None,
        }
    )
    return RLHFDataset(str(path), build_tokenizer(), config)


def test_verl_reads_every_row(files, tmp_path):
    dataset = load_with_verl(files["train"], 32, tmp_path)
    assert len(dataset) == 40
    item, row = dataset[7], pq.read_table(files["train"]).to_pylist()[7]
    assert item["raw_prompt"] == row["prompt"]
    assert item["index"] == 7
    assert item["data_source"] == "countdown"
    assert item["reward_model"]["ground_truth"] == row["reward_model"]["ground_truth"]


def test_verl_measures_prompts_with_the_tiny_tokenizer(files, tmp_path):
    # <|user|>, three numbers, two spaces, " = " and the target, <|end|>, <|assistant|>: at least 12 tokens.
    assert len(load_with_verl(files["train"], 11, tmp_path)) == 0


def test_verl_loads_the_reward_by_path_and_its_manager_takes_the_dictionary(files):
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = OmegaConf.create(
        {"reward": {"custom_reward_function": {"path": reward.__file__, "name": "compute_score", "reward_kwargs": {}}}}
    )
    tokenizer = build_tokenizer()
    row = pq.read_table(files["test"]).to_pylist()[0]
    response = tokenizer(build_response(row["extra_info"]["solution"]) + tokenizer.eos_token)["input_ids"]
    ids = torch.tensor([response + [tokenizer.pad_token_id] * 4])
    data = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": (ids != tokenizer.pad_token_id).long()},
        non_tensors={
            "data_source": [row["data_source"]],
            "reward_model": [row["reward_model"]],
            "extra_info": [row["extra_info"]],
        },
    )

    async def run():
        manager = NaiveRewardManager(OmegaConf.create({}), tokenizer, get_custom_reward_fn(config))
        return await manager.run_single(data)

    result = asyncio.run(run())
    assert result == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "acc": 1.0, "format": 1.0}}


@pytest.mark.parametrize(
    ("option", "message"),
    [("size=0", "verl cannot load an empty file"), ("size=-1", "count=-1 is negative"), ("max_value=0", "max_value=0")],
)
def test_command_line_names_the_bad_key(tmp_path, option, message):
    result = CliRunner().invoke(app, ["build", "countdown", "--out", str(tmp_path), "--option", option])
    assert result.exit_code == 1
    assert message in result.output
    assert not list(tmp_path.glob("*.parquet"))
