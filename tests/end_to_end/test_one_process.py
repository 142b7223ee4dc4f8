"""A run in one process is the run that verl makes through Ray: every metric of every step, from the same seeds. Covers,
with `-m matrix`, on Countdown with the seeded rollout: ACPO with recomputed old log-probabilities, and M2PO with the
rollout's own; the age of rollouts. tests/benchmarks has the queue of weights and the table's fill.
"""

import sys
from pathlib import Path

import pandas
import pytest

from verl_clipx.analysis.runs.run_log import read_run_log

from .runs import common_overrides, metrics_of, train
from .training_ranks import on_ranks

# Last: a script's neighbours there must not hide the standard library's.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

STEPS = 3
STALE = "+clipx/rollout=stale"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
SETTINGS = {
    "acpo": ("+clipx=acpo", STALE),
    "m2po": ("+clipx=m2po", STALE, BYPASS, "actor_rollout_ref.actor.calculate_entropy=true"),
}
# Seconds, bytes, and what follows from them; the order in which Ray's processes came; what Ray's rollout alone counts.
OF_THE_MACHINE = ("timing", "perf/", "actor/perf/")


def train_in_this_process(rank, world, overrides, log):
    from hydra import compose, initialize_config_module
    from one_process.trainer import train as train_in_one_process

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    train_in_one_process(config, Path(log))


def without_metrics_of_machine(log: pandas.DataFrame) -> pandas.DataFrame:
    return log[[name for name in log.columns if not name.startswith(OF_THE_MACHINE)]]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_metric_is_that_of_a_run_through_ray(task, tmp_path, setting):
    overrides = [*SETTINGS[setting], "data.seed=7"]
    through_ray = without_metrics_of_machine(train(task, tmp_path / "ray", *overrides, steps=STEPS).log)
    folder = tmp_path / "in_one_process"
    arguments = [*common_overrides(task, folder, STEPS), *overrides]
    on_ranks(1, train_in_this_process, arguments, str(metrics_of(folder)))
    in_one_process = without_metrics_of_machine(read_run_log(metrics_of(folder)))
    assert set(through_ray.columns) == set(in_one_process.columns)
    assert through_ray["actor/grad_norm"].min() > 0 and through_ray["critic/score/mean"].nunique() > 1
    pandas.testing.assert_frame_equal(in_one_process[through_ray.columns], through_ray, rtol=1e-5, atol=1e-7)


def test_samples_are_of_the_weights_that_many_versions_ago_or_of_noisy_ones(task, tmp_path):
    logs = {}
    for old, noise in ((0, 0), (2, 0), (0, 0.05)):
        overrides = ["+clipx=grpo", STALE, f"clipx_rollout.versions_old={old}", "data.seed=7", BYPASS]
        # One update a rollout batch, so that only the samples' age moves the ratio.
        overrides += [f"+clipx_rollout.noise={noise}", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
        folder = tmp_path / f"{old}-{noise}"
        arguments = [*common_overrides(task, folder, 4), *overrides]
        on_ranks(1, train_in_this_process, arguments, str(folder / "metrics.jsonl"))
        logs[noise or old] = read_run_log(folder / "metrics.jsonl")
    assert logs[0]["training/off_policy/trajectory_staleness/mean"].tolist() == [0, 0, 0, 0]
    assert logs[2]["training/off_policy/trajectory_staleness/mean"].tolist() == [0, 1, 2, 2]
    assert logs[0]["actor/ppo_kl"].abs().max() < 1e-6
    assert logs[2]["actor/ppo_kl"].abs()[1:].min() > 1e-5
    # The weights that train sample the texts again where others sampled them; in a noisy sampler's first batch, too.
    fresh = "clipx_rollout/fresh_reward"
    assert fresh not in logs[0] and logs[2][fresh].notna().tolist() == [False, True, True, True]
    assert logs[0.05][fresh].notna().all() and logs[0.05]["actor/ppo_kl"].abs().median() > 1e-4
