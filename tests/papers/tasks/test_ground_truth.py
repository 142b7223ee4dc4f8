"""Ground truths as text, and files of all tasks that verl loads as one data set.

Covers: encoding and decoding, files of every task given to verl's dataset class together, each row scored by the common
reward. Not covered: verl's reward manager (tests/end_to_end), a training run on such a mixture.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth, encode_ground_truth
from verl_clipx.papers.tasks.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer


@pytest.mark.parametrize(
    "truth", [{"numbers": [3, 5], "target": 8}, {"answers": ["Ä"], "ratio": True}, ["a", "b"], []], ids=repr
)
def test_a_truth_that_is_encoded_as_text_is_decoded(truth):
    text = encode_ground_truth(truth)
    assert isinstance(text, str)
    assert decode_ground_truth(text) == truth
    assert decode_ground_truth(truth) is truth


@pytest.mark.parametrize(
    "text", ["(1) Ann is a knight", "", "{", pytest.param("[" * 100_000, id="brackets nested too deeply")]
)
def test_a_text_that_encodes_nothing_stays(text):
    assert decode_ground_truth(text) == text


@dataclass(frozen=True)
class SmallSet:
    """A data set of a few rows: its options, and the local copy it is built from, below this folder."""

    split: str
    options: dict[str, Any] = field(default_factory=dict)
    copy: str | None = None


SMALL_SETS = {
    "countdown": SmallSet("test", {"size": 3}),
    "countdown_3to4": SmallSet(
        "train", {"train_size": 4, "test_size": 2}, copy="countdown/fixtures/countdown_3to4.jsonl"
    ),
    "knights_and_knaves": SmallSet("test", {"people": [3], "count": 2}),
    "knights_and_knaves_tiny": SmallSet("test"),
    "hitab": SmallSet("train", copy="hitab/fixtures/release"),
    "dapo_17k": SmallSet("train", copy="math/fixtures/dapo.jsonl"),
    "dsr_uniform": SmallSet("train", copy="math/fixtures/dsr_uniform.jsonl"),
    "skywork_or1_math": SmallSet("train", copy="math/fixtures/skywork.jsonl"),
    "aime24": SmallSet("test", copy="math/fixtures/aime24.jsonl"),
    "minerva": SmallSet("test", copy="math/fixtures/minerva.jsonl"),
    "olympiadbench": SmallSet("test", copy="math/fixtures/olympiadbench.jsonl"),
    "sums": SmallSet("test", {"size": 3}),
}


def test_verl_loads_the_files_of_all_tasks_together(tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    files = []
    for name, small_set in SMALL_SETS.items():
        source = None if small_set.copy is None else Path(__file__).parent / small_set.copy
        definition = definition_named(name)
        build_split(definition, tmp_path / name, split=small_set.split, source=source, options=small_set.options)
        files.append(str(tmp_path / name / f"{small_set.split}.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    config = {
        "cache_dir": str(tmp_path / "cache"),
        "prompt_key": "prompt",
        "max_prompt_length": 100_000,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": None,
    }
    dataset = RLHFDataset(files, build_tokenizer(), OmegaConf.create(config))
    items = [dataset[index] for index in range(len(dataset))]
    assert [item["raw_prompt"] for item in items] == [row["prompt"] for row in rows]
    assert [item["index"] for item in items] == [row["extra_info"]["index"] for row in rows]
    for item in items:
        truth = item["reward_model"]["ground_truth"]
        assert isinstance(truth, str)
        assert compute_score(item["data_source"], "", truth)["acc"] == 0.0
    # The variants of a task have its data source.
    variants = {"countdown_3to4", "knights_and_knaves_tiny"}
    assert {item["data_source"] for item in items} == SMALL_SETS.keys() - variants
