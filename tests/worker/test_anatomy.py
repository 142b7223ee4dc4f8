"""Where the ratio comes from: made-up mismatch, staleness, noise and updates of known size, found through the worker.

Covers: each part's quantiles against those of what was made up, within what so many tokens can say and half a bucket;
truncated sampling's sign; classes; tokens over the bounds, counted here; bypass mode; without the rollout's
log-probabilities or ages; Lopti's pass; that a split changes nothing; one all-reduce a rollout batch, none by default.
Not covered: verl's engine (tests/end_to_end/test_training.py).
"""

import math
import re

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.jagged import micro_batch
from tests.worker.test_training_worker import Stepping
from verl_clipx.base.shared_metrics import METRICS
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.anatomy import BUCKETS, PER_SIDE, SIZE, anatomy_metrics, anatomy_sums, bucket_of, quantile
from verl_clipx.loss.contract import example
from verl_clipx.methods import METHODS
from verl_clipx.worker.training_worker import ClipxTraining

ROWS, LENGTH = 48, 256
# Quantiles of |x| of a normal distribution of spread 1.
NORMAL = {"median": 0.6745, "p90": 1.6449, "p99": 2.5758, "p99_9": 3.2905}
TOLERANCE = {"median": 0.05, "p90": 0.05, "p99": 0.08, "p99_9": 0.2}
TWO_UPDATES = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1")


class Updating(Stepping):
    """As verl's worker: each update of a rollout batch has log-probabilities of its own."""

    def __init__(self, config, outputs):
        self.outputs = outputs
        super().__init__(config, outputs[0])

    def train_mini_batch(self, data):
        for of_update in self.outputs:
            self.output = of_update
            output = self.train_batch(data.clone())
        return output


class UpdatingWorker(ClipxTraining, Updating):
    """Ours on top of it."""

    reductions = 0

    def set_loss_fn(self, loss_fn):
        self.engine.optimizer_step = lambda: self.engine.norm
        super().set_loss_fn(loss_fn)

    def _all_reduce(self, vector):
        self.reductions += 1
        return super()._all_reduce(vector)


def noise(seed, spread):
    return spread * torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def metrics_of(actor, monkeypatch):
    """Trains two updates on one rollout batch and returns what is logged of the ratio's parts."""
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")

    def found(*overrides, old, currents, rollout=None, ages=None, group="+clipx=grpo", all=True):
        batch = {
            "old_log_prob": old,
            "log_prob": currents[0],
            "advantages": torch.ones(ROWS, LENGTH, dtype=torch.float64),
            "mask": torch.ones(ROWS, LENGTH, dtype=torch.bool),
        }
        outputs = []
        for current in currents:
            data, output = micro_batch({**batch, "log_prob": current}, list(range(ROWS)))
            outputs.append({"log_probs": output["log_probs"].detach().requires_grad_(True)})
        if rollout is None:
            del data["rollout_log_probs"]
        else:
            data["rollout_log_probs"] = torch.nested.as_nested_tensor(list(rollout), layout=torch.jagged)
        if ages is not None:
            # Sampled by the weights after step 10 - age; the run goes on from step 10.
            tu.assign_non_tensor_stack(data, "extra_fields", [{"max_global_steps": 10 - age} for age in ages])
        wanted = ("clipx.metrics=all",) if all else ()
        worker = UpdatingWorker(actor(group, *wanted, *TWO_UPDATES, "clipx.receipt=off", *overrides), outputs)
        worker.rollouts, before = 10, worker.reductions
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        worker.reduced = worker.reductions - before
        self_made = {key.removeprefix("clipx/anatomy/"): value for key, value in metrics.items() if "anatomy" in key}
        return {key: value for key, (value,) in self_made.items()}, worker

    return found


OLD = -3 * torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def check(metrics, part, spread):
    """The quantiles are those of normal noise of this spread."""
    for name, value in NORMAL.items():
        assert metrics[f"{part}/{name}"] == pytest.approx(spread * value, rel=TOLERANCE[name]), (part, name)
    assert metrics[f"{part}/positive"] == pytest.approx(0.5, abs=0.02)


def test_parts_of_known_size_are_found(metrics_of):
    ages = [0] * (ROWS // 2) + [2] * (ROWS // 4) + [5] * (ROWS // 4)
    stale = torch.tensor([0.0] * (ROWS // 2) + [0.2] * (ROWS // 4) + [0.5] * (ROWS // 4), dtype=torch.float64)[:, None]
    rollout = OLD - noise(1, 0.02) - stale * noise(2, 1.0)
    first, second = OLD + noise(3, 1e-3), OLD + noise(4, 0.1)
    metrics, worker = metrics_of(old=OLD, currents=[first, second], rollout=rollout, ages=ages)
    check(metrics, "engine_mismatch", 0.02)
    check(metrics, "recomputation", 1e-3)
    check(metrics, "update", 0.1)
    # Of a fourth of the tokens each, of unlike age.
    assert metrics["mismatch_and_staleness/p99/age_2"] == pytest.approx(2.5758 * math.hypot(0.02, 0.2), rel=0.1)
    assert metrics["mismatch_and_staleness/p99/age_3_or_more"] == pytest.approx(2.5758 * math.hypot(0.02, 0.5), rel=0.1)
    # Only fresh tokens: nothing to tell apart by age.
    assert not [key for key in metrics if key.startswith("engine_mismatch") and "age" in key]
    # Grpo's bounds are 0.8 and 1.2.
    ratio = (second - OLD).exp()
    outside = ((ratio > 1.2) | (ratio < 0.8)).double().mean()
    assert metrics["update/over_bounds"] == pytest.approx(float(outside)) and float(outside) > 0.01
    assert metrics["recomputation/over_bounds"] == 0
    mismatch = (OLD - rollout).exp()[: ROWS // 2]
    assert metrics["engine_mismatch/over_bounds"] == float(((mismatch > 1.2) | (mismatch < 0.8)).double().mean())
    assert worker.reduced == 1


def test_noise_that_grows_where_the_probability_is_low_and_along_the_response_is_told_apart(metrics_of):
    low, late = OLD.exp() < 0.25, torch.arange(LENGTH) >= 3 * LENGTH // 4
    rollout = OLD - noise(1, 0.01) * torch.where(low, 10.0, 1.0) * torch.where(late, 3.0, 1.0)
    metrics, _ = metrics_of(old=OLD, currents=[OLD, OLD], rollout=rollout, ages=[0] * ROWS)
    by = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("engine_mismatch/p99/")}
    assert by["quartile_1"] > 5 * by["quartile_2"] and by["quartile_2"] == pytest.approx(by["quartile_4"], rel=0.5)
    assert by["position_4"] > 2 * by["position_1"] and by["position_1"] == pytest.approx(by["position_3"], rel=0.2)
    # Where nothing moved.
    assert metrics["recomputation/p99_9"] == 0 and metrics["recomputation/positive"] == 0


def test_a_truncated_distribution_is_one_sided(metrics_of):
    # Renormalised over 80 % of the probability, the sampler's are higher by -log 0.8.
    metrics, _ = metrics_of(old=OLD, currents=[OLD, OLD], rollout=OLD - math.log(0.8), ages=[0] * ROWS)
    assert metrics["engine_mismatch/positive"] == 0
    assert metrics["engine_mismatch/median"] == pytest.approx(-math.log(0.8), rel=0.034)
    # exp(log 0.8) is on the lower bound to the last bit, or just beside it.
    assert metrics["all_parts/median"] == metrics["engine_mismatch/median"]


def test_in_bypass_mode_the_first_update_shows_the_mismatch_and_later_ones_the_whole(metrics_of):
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    ages = [0] * (ROWS // 2) + [1] * (ROWS // 2)
    first, second = OLD + noise(1, 0.03), OLD + noise(1, 0.03) + noise(2, 0.1)
    metrics, _ = metrics_of(bypass, old=OLD, currents=[first, second], rollout=OLD, ages=ages)
    check(metrics, "engine_mismatch", 0.03)
    check(metrics, "mismatch_and_staleness", 0.03)
    assert not [key for key in metrics if key.startswith(("recomputation", "update"))]
    # Both updates' tokens.
    whole = torch.cat([first - OLD, second - OLD]).abs()
    assert metrics["all_parts/p90"] == pytest.approx(float(whole.quantile(0.9)), rel=0.04)


def test_without_the_rollouts_log_probabilities_two_parts_are_left(metrics_of):
    rollout = "actor_rollout_ref.rollout.calculate_log_probs=False"
    metrics, _ = metrics_of(rollout, old=OLD, currents=[OLD, OLD + noise(2, 0.1)])
    assert {key.partition("/")[0] for key in metrics} == {"recomputation", "update"}


def test_without_ages_no_token_is_called_fresh(metrics_of):
    metrics, _ = metrics_of(old=OLD, currents=[OLD, OLD], rollout=OLD - noise(1, 0.02))
    assert "mismatch_and_staleness/p99" in metrics and "engine_mismatch/p99" not in metrics


def test_old_log_probs_of_other_weights_leave_no_recomputation(metrics_of):
    later = ("trainer.v1.trainer_mode=separate_async",)
    metrics, _ = metrics_of(*later, old=OLD, currents=[OLD + noise(1, 0.1)] * 2, rollout=OLD, ages=[1] * ROWS)
    assert "recomputation/p99" not in metrics
    check(metrics, "update", 0.1)


def test_of_a_method_that_bounds_something_else_nothing_is_over_the_ratios_bounds(metrics_of):
    metrics, _ = metrics_of(old=OLD, currents=[OLD, OLD + noise(2, 0.1)], group="+clipx=gspo")
    assert "update/p99" in metrics and not [key for key in metrics if "over_bounds" in key]


def test_by_default_nothing_of_it_is_computed(metrics_of):
    metrics, worker = metrics_of(old=OLD, currents=[OLD, OLD], rollout=OLD, ages=[0] * ROWS, all=False)
    assert metrics == {} and worker.anatomy is None and worker.reduced == 0


def test_keys_are_declared(metrics_of):
    ages = [0] * (ROWS // 2) + [2] * (ROWS // 2)
    metrics, _ = metrics_of(old=OLD, currents=[OLD, OLD + noise(1, 0.1)], rollout=OLD - noise(2, 0.1), ages=ages)
    patterns = [re.compile(metric.pattern) for metric in METRICS if metric.name.startswith("anatomy/")]
    assert [key for key in metrics if not any(p.fullmatch(f"clipx/anatomy/{key}") for p in patterns)] == []
    assert len(metrics) > 40 and not [key for key in metrics if "max" in key or "min" in key]


def sums_of(batch, rows, counted=None):
    names = ("log_prob", "old_log_prob", "advantages", "mask")
    inputs = Inputs(*(batch[name][rows] for name in names), counted=None if counted is None else counted[rows])
    return anatomy_sums(
        METHODS["grpo"](),
        None,
        inputs,
        torch.zeros(0, dtype=torch.float64),
        rollout_log_prob=batch["rollout_log_prob"][rows],
        age=torch.tensor([0, 1, 2, 3, 4, 0])[rows],
        equal_weights=False,
        bypass=False,
    )


def test_sums_are_the_same_however_the_tokens_are_split():
    batch = example()
    whole = sums_of(batch, torch.arange(6))
    parts = sum(sums_of(batch, torch.tensor(rows)) for rows in ([4], [0, 3], [1, 2, 5]))
    assert torch.equal(whole, parts) and whole.shape == (SIZE,)
    # Each token of each part once by each of probability, age and position.
    parts_seen = {key.split("/")[2] for key in anatomy_metrics(whole)}
    assert parts_seen == {"engine_mismatch", "mismatch_and_staleness", "update", "all_parts"}
    assert whole[: -2 * 5].sum() == 3 * 3 * int(batch["mask"].sum())


def test_tokens_outside_a_pass_and_values_that_are_not_finite_count_nowhere():
    batch = example()
    counted = batch["old_log_prob"] < -1
    batch["log_prob"][~batch["mask"]] = float("nan")
    batch["log_prob"][0, 0] = float("nan")
    found = sums_of(batch, torch.arange(6), counted=counted)
    inside = batch["mask"] & counted
    updates = int((inside & batch["log_prob"].isfinite()).sum())
    assert found[-10:].tolist()[2 * 3 + 1] == updates and found.isfinite().all()


def test_buckets_hold_what_they_say():
    values = torch.tensor([0.0, 1e-7, -1e-7, 1e-6, -1e-6, 0.5, -0.5, 20.0, 1e9, -1e9, float("nan")])
    buckets = bucket_of(values).tolist()
    assert buckets[:3] == [PER_SIDE] * 3 and buckets[3] == PER_SIDE + 1 and buckets[4] == PER_SIDE - 1
    assert buckets[5] - PER_SIDE == PER_SIDE - buckets[6] > 0
    assert buckets[7] == buckets[8] == BUCKETS - 1 and buckets[9] == 0 and buckets[10] == PER_SIDE
    counts = torch.zeros(BUCKETS)
    counts[buckets[5]] = counts[buckets[6]] = 1
    assert quantile(counts, 0.5) == pytest.approx(0.5, rel=0.034)
    counts[PER_SIDE] = 3
    assert quantile(counts, 0.5) == 0
