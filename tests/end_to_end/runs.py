"""Launches the real verl on the CPU, as a user would, and reads what it logged."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas

from verl_clipx.diagnostics.run_log import read_run_log

SECONDS = 420


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        log: metrics, a row a step.
        output: everything that it printed.
        folder: where it wrote.
    """

    log: pandas.DataFrame
    output: str
    folder: Path

    def mean(self, metric: str) -> float:
        """A metric's mean over steps."""
        return float(self.log[metric].mean())


def train(task, folder: Path, *overrides: str, steps: int = 2, environment: dict[str, str] | None = None) -> Run:
    """Trains for a few steps and returns what happened.

    Args:
        task: data and policy.
        folder: where the run writes.
        overrides: Hydra overrides after the common ones.
        steps: training steps.
        environment: further environment variables.

    Raises:
        AssertionError: the run failed or did not end in time; the message holds the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+hardware=cpu",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={task.train}",
        f"data.val_files={task.test}",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        "reward.custom_reward_function.path=pkg://verl_clipx.tasks.countdown.reward",
        f"actor_rollout_ref.model.path={task.policy}",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    log = folder / "run.log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                timeout=SECONDS,
                env={
                    **os.environ,
                    "VERL_PLATFORM": "cpu",
                    "VERL_FILE_LOGGER_PATH": str(metrics),
                    **(environment or {}),
                },
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = f"none within {SECONDS} s"
    text = log.read_text(errors="replace")
    assert code == 0, f"exit code {code} of {' '.join(command)}\n{text[-6000:]}"
    return Run(read_run_log(metrics), text, folder)
