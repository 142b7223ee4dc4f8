"""The page's line on what was trained, from a record: all parts, a CPU, records that lack parts or hold other types."""

import pandas
import pytest

from verl_clipx.runs.run import Run
from verl_clipx.runs.trained import what_was_trained

ACTOR = "actor_rollout_ref.actor"
WHOLE = {
    "actor_rollout_ref.model.path": "/models/Qwen/Qwen2.5-7B/",
    "data.train_files": ["/data/math/train.parquet", "/data/code/train.parquet"],
    "data.train_batch_size": 512,
    "actor_rollout_ref.rollout.n": 16,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    "trainer.nnodes": 4,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
}
LINE = (
    "Qwen2.5-7B on math/train.parquet and code/train.parquet, 512 prompts × 16 responses a rollout batch, "
    "16 updates on each, learning rate 1e-06, 4 × 8 H100."
)


@pytest.mark.parametrize(
    ("configuration", "records", "lines"),
    [
        (
            WHOLE,
            [{"accelerators": ["H100"], "started": f"2026-11-2{day} 10:00 UTC"} for day in (2, 1)],
            [LINE, "Started 2026-11-21 10:00 UTC to 2026-11-22 10:00 UTC."],
        ),
        ({}, [{}], []),
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}, [{}], ["2 workers on the CPU."]),
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2}, [{"accelerators": 3}], ["2 accelerators."]),
        ({"data.train_files": "gsm8k.parquet"}, [{}], ["gsm8k.parquet."]),
        ({f"{ACTOR}.optim.lr": None, "trainer.nnodes": "x"}, [{}], []),
    ],
)
def test_the_line_has_what_the_record_has(configuration, records, lines):
    log = pandas.DataFrame({"actor/entropy": [1.0]}, index=[1])
    assert what_was_trained([Run("run", log, configuration, record) for record in records]) == lines
