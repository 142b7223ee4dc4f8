"""Runs and settings for tests of diagnose: made-up logs, configurations, and validations with given scores."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from tests.analysis.runs.example_runs import write_validation
from verl_clipx.analysis.diagnose.diagnosis import diagnose
from verl_clipx.analysis.diagnose.findings import compare_rewards, find_alarms
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.held_out import HeldOutReward, read_held_out_rewards
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
# All prompts of a rollout batch are in one mini-batch.
ONE_UPDATE = {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.ppo_epochs": 1}
# A verl trainer that is in step with its samples.
IN_SYNC = {"trainer.use_v1": True, "trainer.v1.trainer_mode": "sync"}
ONE_UPDATE_IN_SYNC = ONE_UPDATE | IN_SYNC
FOUR_UPDATES_IN_SYNC = ONE_UPDATE_IN_SYNC | {f"{ACTOR}.ppo_mini_batch_size": 2}
BINS = range(5)
FLOOR_TOKENS = {f"actor/clipx/floor/tokens/bin_{index}": 1000.0 for index in BINS}
RECUT_TOKENS = {f"actor/clipx/floor_recut/tokens/bin_{index}": 1000.0 for index in BINS}
# Rounding alone clips 2 % of the 5000 tokens of each first update.
FLOOR_OF_2_PERCENT = {keys.FLOOR_LOW: 0.01, keys.FLOOR_HIGH: 0.01} | FLOOR_TOKENS
# Only a second measurement, in other micro-batches, finds the same.
RECUT_OF_2_PERCENT = {keys.FLOOR_LOW: 0.0, keys.FLOOR_HIGH: 0.0} | FLOOR_TOKENS
RECUT_OF_2_PERCENT |= {keys.RECUT_LOW: 0.01, keys.RECUT_HIGH: 0.01} | RECUT_TOKENS


def find_rules(run: Run) -> list[str]:
    """Return the names of the rules that a run meets."""
    return [diagnosis.rule.name for diagnosis in diagnose(run)]


def collect_findings(settings: list[Setting]) -> list:
    """Return all that a page says of settings: what their runs are diagnosed with, then how their rewards compare."""
    return [*find_alarms(settings), *compare_rewards(settings)]


def make_run(
    columns: Mapping[str, Any],
    configuration: Mapping[str, Any] | None = None,
    *,
    steps: int | None = None,
    held_out: Sequence[HeldOutReward] = (),
    name: str = "run",
) -> Run:
    """Return a run with a row for each step from 1 on.

    Args:
        columns: from a metric to its values, one for each step, or to its one value in all steps.
        configuration: from a dotted key to its value.
        steps: how many steps; by default as many as the longest of the columns has.
        held_out: the rewards of its validations.
        name: the run's.
    """
    if steps is None:
        steps = max(len(values) for values in columns.values())
    log = pandas.DataFrame(columns, index=pandas.RangeIndex(1, steps + 1, name="step"))
    return Run(name, log, configuration or {}, held_out=list(held_out))


def make_setting(label: str, *rewards: Sequence[float], seeds: Sequence[int] = ()) -> Setting:
    """Return a setting with a run for each list of training rewards.

    Args:
        label: the setting's.
        rewards: those of each run, one for each step.
        seeds: those of the first runs; the other runs have no seed in their records.
    """
    runs = []
    for index, (rewards_of_run, seed) in enumerate(itertools.zip_longest(rewards, seeds)):
        configuration = {"data.seed": seed} if seed else {}
        runs.append(make_run({keys.REWARD: rewards_of_run}, configuration, name=f"{label}{index}"))
    return Setting(label, runs)


def make_setting_of_one_run(columns: Mapping[str, Any], label: str = "M", **parameters: Any) -> Setting:
    """Return a setting of one run, whose `clipx` node has these parameters."""
    configuration = {f"clipx.{name}": value for name, value in parameters.items()}
    return Setting(label, [make_run(columns, configuration)])


def make_validated_setting(folder: Path, label: str, *validations: Mapping[int, list[tuple[float, ...]]]) -> Setting:
    """Return a setting with a run for each mapping from the steps of validations to each problem's scores.

    Args:
        folder: where the files of the validations are written.
        label: the setting's.
        validations: those of each run; a problem has a score for each of its samples.
    """
    runs = []
    for index, scores_by_step in enumerate(validations):
        name = f"{label}{index}"
        write_validation(folder / name, scores_by_step)
        held_out = read_held_out_rewards(folder / name)
        runs.append(make_run({keys.REWARD: [0.1]}, held_out=held_out, name=name))
    return Setting(label, runs)
