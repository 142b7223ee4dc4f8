"""Trains at a rate of 0, and at one at which nothing really moves, by verl's trainer in one process: what later
updates see there is rounding alone.

`python benchmarks/floor.py --model FOLDER --standing` prints it, for docs/floor.md.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
from torch import Tensor
from worker_update import compose_run

from verl_clipx.training.worker.step import MicroBatch, Observer, OptimizerStep, RolloutBatch

PROMPTS, SAMPLES, TOKENS = 4, 2, 40
STEPS = 3
# A rollout batch of 8 rows in four updates of 2 rows.
RUN = (
    "+clipx/rollout=seeded",
    "+clipx=grpo",
    f"data.train_batch_size={PROMPTS}",
    f"data.max_response_length={TOKENS}",
    "data.max_prompt_length=64",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "clipx_rollout.cpu_dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
    "algorithm.adv_estimator=grpo",
    "data.seed=1",
    "actor_rollout_ref.actor.data_loader_seed=1",
    "actor_rollout_ref.rollout.seed=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    f"reward.custom_reward_function.path={Path(__file__)}",
    "reward.custom_reward_function.name=reward_of_length",
)
STILL = "actor_rollout_ref.actor.optim.lr=0"
# So small that in float32 the log-probabilities stay where they were, although some weights round to other ones.
HARDLY = "actor_rollout_ref.actor.optim.lr=1e-8"
PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
# Rows of a micro-batch in old_log_probs; the updates have micro-batches of 2 rows.
OLD_CUT = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
# By its name: a run's overrides.
RUNS = {
    "2 rows, as in old_log_probs": (f"{OLD_CUT}=2", STILL),
    "2 rows, 8 in old_log_probs": (f"{OLD_CUT}=8", STILL),
    "2 rows, as in old_log_probs; rate 1e-8": (f"{OLD_CUT}=2", HARDLY),
    "the same in float32": (f"{OLD_CUT}=2", HARDLY, f"{PRECISION}=fp32"),
}


def reward_of_length(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Returns a response's number of characters in hundreds: any reward does that differs within a group."""
    return {"score": len(solution_str) / 100}


class UpdateDistances(Observer):
    """Keeps the log-ratios of each update by its rollout batch."""

    def __init__(self) -> None:
        self.updates: list[list[Tensor]] = []
        self.log_ratios: list[Tensor] = []

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        self.updates.append([])

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        self.log_ratios = []

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        inputs = micro_batch.applied.inputs
        log_ratio = inputs.log_prob.detach().float() - inputs.old_log_prob.float()
        self.log_ratios.append(log_ratio[inputs.mask])

    def end_update(self, step: OptimizerStep) -> None:
        self.updates[-1].append(torch.cat(self.log_ratios).double())


class Standing(NamedTuple):
    """How far later updates of a run were from ratio 1, beside the floor's two measurements.

    Args:
        first: mean absolute log-ratio of the floor as the run logged it, over all first updates.
        second: that of the second measurement, in the first rollout batch.
        later: of each later update of each rollout batch.
        outside: the share of the later updates' tokens whose ratio is outside 0.8 to 1.2.
        tokens: of the first updates, the second measurement and the later updates.
    """

    first: float
    second: float
    later: list[float]
    outside: float
    tokens: tuple[int, int, int]

    @property
    def nearer(self) -> str:
        """Names the measurement that is nearer to the mean of the later updates."""
        mean = sum(self.later) / len(self.later)
        first, second = abs(self.first - mean), abs(self.second - mean)
        if first == second:
            return "both"
        return "first" if first < second else "second"


def write_prompts(file: Path, texts: Sequence[str]) -> None:
    """Writes prompts as verl reads them."""
    rows = [
        {
            "data_source": "stories",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    pandas.DataFrame(rows).to_parquet(file)


def train_standing(model: Path, texts: Sequence[str], overrides: Sequence[str]) -> Standing:
    """Trains a run, and returns what its updates saw.

    Args:
        texts: the prompts, in the order of their rollout batches.
    """
    # They import verl, which needs the environment of the only rank.
    from one_process.trainer import OneProcessTrainer, train

    distances = UpdateDistances()

    class ObservedTrainer(OneProcessTrainer):
        def _setup(self) -> None:
            super()._setup()
            self.actor_rollout_wg.worker.actor.observers.add(distances)

    with tempfile.TemporaryDirectory() as folder:
        prompts, log = Path(folder) / "prompts.parquet", Path(folder) / "metrics.jsonl"
        write_prompts(prompts, texts)
        files = [f"data.train_files={prompts}", f"data.val_files={prompts}", "data.shuffle=false"]
        train(compose_run(model, 1, [*RUN, *files, *overrides]), log, ObservedTrainer)
        steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    return standing_of([step for step in steps if "actor/clipx/floor/log_ratio" in step], distances.updates)


def standing_of(steps: Sequence[Mapping[str, float]], updates: Sequence[Sequence[Tensor]]) -> Standing:
    """Returns what a run logged of its floor, and what its later updates saw.

    Args:
        steps: the metrics of each step.
        updates: of each rollout batch, the log-ratios of each update.
    """
    later = [log_ratio for batch in updates for log_ratio in batch[1:]]
    ratio = torch.cat(later).exp()
    counted = [tokens_of(step, "floor") for step in steps]
    first = sum(step["actor/clipx/floor/log_ratio"] * tokens for step, tokens in zip(steps, counted, strict=True))
    tokens = (sum(counted), tokens_of(steps[0], "floor_recut"), sum(map(len, later)))
    return Standing(
        first=first / sum(counted),
        second=steps[0]["actor/clipx/floor_recut/log_ratio"],
        later=[float(log_ratio.abs().mean()) for log_ratio in later],
        outside=float(((ratio < 0.8) | (ratio > 1.2)).double().mean()),
        tokens=tokens,
    )


def tokens_of(step: Mapping[str, float], floor: str) -> int:
    """Returns how many tokens a measurement of the floor is of, in one step."""
    return round(sum(value for key, value in step.items() if key.startswith(f"actor/clipx/{floor}/tokens/")))
