"""Ground truths as text, and files of all tasks that verl loads as one data set.

Covers: encoding and decoding, files of every task given to verl's dataset class together, each row scored by the common
reward. Not covered: verl's reward manager (tests/end_to_end), a training run on such a mixture.
"""

from pathlib import Path

import pyarrow.parquet as pq
from omegaconf import OmegaConf

from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth, encode_ground_truth
from verl_clipx.papers.tasks.reward import compute_score
from verl_clipx.papers.tasks.tiny_policy.tokenizer import build_tokenizer

TASKS = Path(__file__).parent

# data set, local copy, split, options
SETS = [
    ("countdown", None, "test", {"size": 3}),
    ("countdown_3to4", "countdown/fixtures/countdown_3to4.jsonl", "train", {"train_size": 4, "test_size": 2}),
    ("knights_and_knaves", None, "test", {"people": [3], "count": 2}),
    ("knights_and_knaves_tiny", None, "test", {}),
    ("hitab", "hitab/fixtures/release", "train", {}),
    ("dapo_17k", "math/fixtures/dapo.jsonl", "train", {}),
    ("dsr_uniform", "math/fixtures/dsr_uniform.jsonl", "train", {}),
    ("skywork_or1_math", "math/fixtures/skywork.jsonl", "train", {}),
    ("aime24", "math/fixtures/aime24.jsonl", "test", {}),
    ("minerva", "math/fixtures/minerva.jsonl", "test", {}),
    ("olympiadbench", "math/fixtures/olympiadbench.jsonl", "test", {}),
    ("sums", None, "test", {"size": 3}),
]


def test_what_is_encoded_is_decoded_and_all_else_stays():
    for truth in ({"numbers": [3, 5], "target": 8}, {"answers": ["Ä"], "ratio": True}, ["a", "b"], []):
        assert isinstance(encode_ground_truth(truth), str)
        assert decode_ground_truth(encode_ground_truth(truth)) == truth
        assert decode_ground_truth(truth) is truth
    for text in ("(1) Ann is a knight", "", "{", "[" * 100_000):
        assert decode_ground_truth(text) == text


def test_verl_loads_the_files_of_all_tasks_together(tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    files, rows = [], 0
    for name, source, split, options in SETS:
        copy = None if source is None else TASKS / source
        rows += build_split(definition_named(name), tmp_path / name, split=split, source=copy, options=options).rows
        files.append(str(tmp_path / name / f"{split}.parquet"))
    config = {"cache_dir": str(tmp_path / "cache"), "prompt_key": "prompt", "max_prompt_length": 100_000}
    config |= {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": None}
    dataset = RLHFDataset(files, build_tokenizer(), OmegaConf.create(config))
    assert len(dataset) == rows
    stored = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [dataset[index]["raw_prompt"] for index in range(rows)] == [row["prompt"] for row in stored]
    assert [dataset[index]["index"] for index in range(rows)] == [row["extra_info"]["index"] for row in stored]
    found = set()
    for item in (dataset[index] for index in range(rows)):
        found.add(item["data_source"])
        assert isinstance(item["reward_model"]["ground_truth"], str)
        assert compute_score(item["data_source"], "", item["reward_model"]["ground_truth"])["acc"] == 0.0
    assert found == {"countdown", *(name for name, *_ in SETS if not name.endswith(("_3to4", "_tiny")))}
