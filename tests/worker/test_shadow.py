"""Methods in the shadow of the one that trains.

Covers: that loss, gradient, weights and random numbers are the same to the last bit with and without; bounds, clip
fractions and products against those of the whole mini-batch, computed here, however it is split over micro-batches and
ranks; that a shadow of the running method is that method, also under every modifier and a receipt; keys; collectives.
Not covered: verl's engine (tests/end_to_end/test_training.py).
"""

import math
import re
import threading

import pytest
import torch
from verl.utils import tensordict_utils as tu

from tests.jagged import micro_batch
from tests.worker.test_logged_metrics import random_batch
from tests.worker.test_training_worker import THREE_UPDATES, Stepping
from verl_clipx.base.shared_metrics import COSINE, METRICS
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.contract import evaluate
from verl_clipx.methods import METHODS
from verl_clipx.worker.shadow import ShadowLosses
from verl_clipx.worker.step import Kept, OptimizerStep, RolloutBatch
from verl_clipx.worker.training_worker import ClipxTraining

SHADOW = ("+clipx/shadow=[acpo,bapo,dgpo,gspo]", "clipx.shadow.acpo.alpha=0.5", "clipx.shadow.bapo.target=0.9")


class Learning(Stepping):
    """As verl's worker, a rollout batch being three updates; the weights are the log-probabilities themselves."""

    def train_batch(self, data):
        output = super().train_batch(data)
        leaf = self.output["log_probs"]
        with torch.no_grad():
            leaf.values().sub_(leaf.grad.values() * 3 + 0.01 * torch.rand(leaf.grad.values().shape))
        return output

    def train_mini_batch(self, data):
        updates = [tu.get(self.train_batch(data.clone()), "metrics") for _ in range(3)]
        found = {key: [update[key][0] for update in updates if key in update] for key in updates[0]}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": found})


class LearningWorker(ClipxTraining, Learning):
    """Ours on top of it."""

    def set_loss_fn(self, loss_fn):
        self.engine.optimizer_step = lambda: self.engine.norm
        super().set_loss_fn(loss_fn)


@pytest.fixture
def trained(actor, monkeypatch):
    """Trains on a rollout batch; returns the metrics, the weights after it and the next random number."""
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")

    def train(*overrides, **fields):
        torch.manual_seed(0)
        batch = {
            name: values.float() if values.is_floating_point() else values for name, values in random_batch(0).items()
        }
        data, output = micro_batch(batch, [0, 1, 2, 3, 4, 5], entropy=batch["entropy"])
        data["rm_scores"] = data["advantages"]
        for name, of in fields.items():
            data[name] = of(data)
        output["log_probs"] = output["log_probs"].detach().requires_grad_(True)
        worker = LearningWorker(actor(*overrides, *THREE_UPDATES), output)
        metrics = tu.get(worker.train_mini_batch(data), "metrics")
        return metrics, output["log_probs"].detach().values().clone(), torch.rand(4)

    return train


ACPO = ("+clipx=acpo", "clipx.alpha=0.5", "clipx.scope=micro_batch", "clipx.metrics=all")
MODIFIED = (
    *ACPO,
    "+clipx/shaping=advantage_reweighting",
    "+clipx/select=high_entropy",
    "clipx.select.ratio=0.5",
    "clipx.select.normaliser=all",
)


@pytest.mark.parametrize("overrides", [("+clipx=grpo", "clipx.metrics=all"), ACPO, MODIFIED])
def test_weights_loss_and_random_numbers_are_the_same_to_the_last_bit(trained, overrides):
    weighted = dict(rollout_is_weights=lambda data: data["old_log_probs"] * -0.5)
    metrics, weights, number = trained(*overrides, **weighted)
    shadowed, weights_shadowed, number_shadowed = trained(*overrides, *SHADOW, **weighted)
    assert torch.equal(weights, weights_shadowed) and torch.equal(number, number_shadowed)
    assert metrics == {key: values for key, values in shadowed.items() if "/shadow/" not in key}
    assert len(shadowed) > len(metrics) and len(weights.unique()) > 50


@pytest.mark.parametrize("overrides", [ACPO, MODIFIED])
def test_a_shadow_of_the_running_method_is_that_method(trained, overrides):
    weighted = dict(rollout_is_weights=lambda data: data["old_log_probs"] * -0.5)
    metrics, *_ = trained(*overrides, "+clipx/shadow=[acpo]", "clipx.shadow.acpo.alpha=0.5", **weighted)
    own = {key: values for key, values in metrics.items() if "/shadow/" not in key}
    shared = [key for key in own if f"clipx/shadow/acpo/{key.removeprefix('clipx/')}" in metrics]
    assert {"clipx/clip_fraction_high", "clipx/epsilon/bin_1", "clipx/gradient_mass/M", "clipx/epsilon_last/bin_0"} <= {
        *shared
    }
    for key in shared:
        of_shadow = metrics[f"clipx/shadow/acpo/{key.removeprefix('clipx/')}"]
        assert of_shadow == pytest.approx(own[key], rel=1e-9, abs=1e-12), key
    assert metrics["clipx/shadow/acpo/cosine"] == pytest.approx([1, 1, 1])
    assert metrics["clipx/shadow/acpo/norm_ratio"] == pytest.approx([1, 1, 1])
    assert len({*metrics["clipx/shadow/acpo/epsilon/bin_1"]}) == 3


def test_probes_of_the_receipt_are_not_taken_for_tokens(trained):
    shadow = ("+clipx/shadow=[acpo]", "clipx.shadow.acpo.alpha=0.5")
    (with_receipt, *_), (without, *_) = (trained(*ACPO, *shadow, f"clipx.receipt={value}") for value in ("stop", "off"))
    assert "clipx/receipt" in with_receipt
    for key in (key for key in without if "/shadow/" in key):
        assert with_receipt[key] == without[key], key


def kept_of(batch, rows) -> Kept:
    """What a run of GRPO keeps of some rows."""
    rows = torch.tensor(rows)
    names = ("log_prob", "old_log_prob", "advantages", "mask")
    inputs = Inputs(*(batch[name][rows] for name in names), rollout_log_prob=batch["rollout_log_prob"][rows])
    grpo = evaluate(METHODS["grpo"](), **{name: batch[name][rows] for name in names})
    return Kept(inputs, None, torch.where(inputs.mask, grpo.weight * inputs.advantages, 0.0))


def over_ranks(settings, split, batch):
    """A rollout batch of one update on ranks that sum as collectives do; returns each rank's metrics and its sums."""
    barrier, shelf, counts = threading.Barrier(len(split)), {}, [0] * len(split)
    found = [None] * len(split)

    def rank(number, parts):
        def all_reduce(vector):
            shelf[number] = vector
            counts[number] += 1
            barrier.wait()
            total = sum(shelf[other] for other in range(len(split)))
            barrier.wait()
            return total

        shadow = ShadowLosses(settings, "cpu", all_reduce)
        shadow.end_update(OptimizerStep(kept=[kept_of(batch, rows) for rows in parts]))
        found[number] = shadow.end_rollout_batch(RolloutBatch())

    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(split)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, counts


SPLITS = [
    [[[0, 1, 2, 3, 4, 5]]],
    [[[0], [1, 2], [3, 4, 5]]],
    [[[0, 5], [3]], [[1, 2], [4]]],
    [[[4, 5, 0, 1, 2, 3]], []],
]


@pytest.mark.parametrize("split", SPLITS)
def test_numbers_are_those_of_the_whole_mini_batch_however_it_is_split(actor, split):
    settings, batch = actor("+clipx=grpo", *SHADOW, "clipx.metrics=all").policy_loss.clipx, random_batch(0)
    found, counts = over_ranks(settings, split, batch)
    assert all(one == found[0] for one in found) and counts == [2] * len(split)
    tensors = {name: batch[name] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
    mask, advantages = batch["mask"], batch["advantages"]
    grpo = evaluate(METHODS["grpo"](), **tensors)
    run = (grpo.weight * advantages)[mask]
    for name, method in settings.shadow.methods.items():
        one = evaluate(method, **tensors)
        bounded = method.bounded(one.tokens)
        above, below = bounded > one.bounds.high, bounded < one.bounds.low
        expected = {
            "clip_fraction_low": (below & ~above & (advantages < 0))[mask].double().mean(),
            "clip_fraction_high": (above & (advantages > 0))[mask].double().mean(),
        }
        mine = (one.weight * advantages)[mask]
        expected["cosine"] = mine @ run / (mine.norm() * run.norm())
        expected["norm_ratio"] = mine.norm() / run.norm()
        for key, value in expected.items():
            assert found[0][f"clipx/shadow/{name}/{key}"] == pytest.approx([float(value)], rel=1e-6), (name, key)
    r = (batch["log_prob"] - batch["old_log_prob"]).exp()[mask]
    in_bin = ((batch["old_log_prob"].exp() * 5).long().clamp(0, 4) == 2)[mask]
    epsilon = 0.5 * float(r[in_bin].std(correction=0)) + 0.2
    assert found[0]["clipx/shadow/acpo/epsilon/bin_2"] == pytest.approx([epsilon], rel=1e-9)
    # The made-up target moves the search off its start.
    assert found[0]["clipx/shadow/bapo/c_high"][0] > 1.2


def test_fixed_bounds_are_summed_over_ranks_once_a_rollout_batch(actor):
    settings = actor("+clipx=grpo", "+clipx/shadow=[dgpo]").policy_loss.clipx
    _, counts = over_ranks(settings, SPLITS[2], random_batch(0))
    assert counts == [1, 1]


def test_keys_are_declared_and_default_metrics_are_fewer(trained):
    patterns = [
        re.compile(f"(clipx/shadow/[^/]+/)?{metric.pattern}".replace("clipx/", "(clipx/)?")) for metric in METRICS
    ]
    patterns += [
        re.compile(f"(clipx/shadow/[^/]+/)?{metric.pattern}".replace("clipx/", "(clipx/)?"))
        for name in ("acpo", "bapo")
        for metric in METHODS[name].logs
    ]
    default, everything = (
        {key for key in trained("+clipx=grpo", *SHADOW, f"clipx.metrics={which}")[0] if "/shadow/" in key}
        for which in ("default", "all")
    )
    assert default < everything and "clipx/shadow/acpo/cosine" in default
    assert [key for key in everything if not any(pattern.fullmatch(key) for pattern in patterns)] == []
    assert re.compile(COSINE.pattern).fullmatch("clipx/shadow/acpo/cosine")


def test_what_has_no_gradient_has_no_cosine(actor):
    settings, batch = actor("+clipx=grpo", "+clipx/shadow=[dgpo]").policy_loss.clipx, random_batch(0)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    found, _ = over_ranks(settings, SPLITS[0], batch)
    assert found[0]["clipx/shadow/dgpo/cosine"] == [0.0]
    assert all(math.isfinite(value) for values in found[0].values() for value in values)
