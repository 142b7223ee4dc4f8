"""+clipx=observe: verl's own losses unchanged to the last bit, and the metrics of what they do. Not covered: splits of
the mini-batch (test_logged_metrics.py), the engine (tests/end_to_end), what is refused (tests/run/test_groups.py).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

from tests.host_syncs import counted_host_syncs
from tests.jagged import micro_batch
from tests.training.worker.test_training_worker import Worker
from verl_clipx.losses.base.shared_metrics import REGIONS
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.config import Observe
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.observe import SEQUENCE_LEVEL, observe_registered
from verl_clipx.training.worker.registry import is_ours
from verl_clipx.training.worker.step import OptimizerStep

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"
LOSSES = sorted(name for name, function in core_algos.POLICY_LOSS_REGISTRY.items() if not is_ours(function))
# Overrides without which a loss cannot be called, or draws no random numbers for a batch as small as these.
NEEDED_BY_LOSS = {
    "dro": [f"{POLICY_LOSS}.dro_beta=0.3"],
    "clip_cov": [f"{POLICY_LOSS}.clip_cov_lb=0.01", f"{POLICY_LOSS}.clip_cov_ratio=0.2"],
    "kl_cov": [f"{POLICY_LOSS}.kl_cov_ratio=0.2"],
}
OTHER_TERMS = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.3", f"{ACTOR}.entropy_coeff=0.1"]
ROWS = [0, 1, 2, 3, 4]


@pytest.fixture(autouse=True)
def copy_of_registry(monkeypatch):
    """A copy of verl's registry, so that what a test wraps in it is gone afterwards."""
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))


@pytest.fixture
def build_plain(actor):
    """Returns verl's ppo_loss for a loss mode."""

    def build(loss_mode, *overrides):
        needed = NEEDED_BY_LOSS.get(loss_mode, [])
        return partial(ppo_loss, config=actor(f"{POLICY_LOSS}.loss_mode={loss_mode}", *needed, *overrides))

    return build


@pytest.fixture
def build_observed(build_plain):
    """As `build_plain`, installed as the worker does under +clipx=observe."""

    def build(loss_mode, *overrides):
        function = build_plain(loss_mode, "+clipx=observe", *overrides)
        observe_registered(loss_mode)
        return with_micro_batch(function, function.keywords["config"].policy_loss.clipx, Schedule(), OptimizerStep)

    return build


class Call(NamedTuple):
    """What a call of a loss function gave."""

    loss: torch.Tensor
    log_prob_gradient: torch.Tensor
    entropy_gradient: torch.Tensor
    metrics: dict[str, Any]
    generator_state: torch.Tensor

    @property
    def tensors(self):
        return self.loss, self.log_prob_gradient, self.entropy_gradient


def call(function, batch, *, rows=ROWS, has_weights=False):
    """Calls a loss function on a micro-batch of some rows."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    entropy = batch["entropy"].clone().requires_grad_(True)
    reference = batch["log_prob"] - 0.1
    data, output = micro_batch({**batch, "log_prob": log_prob}, rows, entropy=entropy, reference=reference)
    if has_weights:
        data["rollout_is_weights"] = data["old_log_probs"] * -0.5
    torch.manual_seed(3)
    loss, metrics = function(model_output=output, data=data)
    generator_state = torch.get_rng_state()
    loss.backward()
    numbers = {key: value.values if isinstance(value, Metric) else value for key, value in metrics.items()}
    return Call(loss.detach(), log_prob.grad, entropy.grad, numbers, generator_state)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "has_weights"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_loss_gradients_metrics_and_random_numbers_stay_to_the_last_bit(
    build_plain, build_observed, loss_mode, dtype, has_weights
):
    batch = example(dtype)
    plain = call(build_plain(loss_mode, *OTHER_TERMS), batch, has_weights=has_weights)
    observed = call(build_observed(loss_mode, *OTHER_TERMS), batch, has_weights=has_weights)
    for actual, expected in zip(observed.tensors, plain.tensors, strict=True):
        assert torch.equal(actual, expected)
    assert plain.log_prob_gradient.any() and plain.entropy_gradient.any()
    assert torch.equal(observed.generator_state, plain.generator_state)
    if loss_mode == "clip_cov":
        # It does draw random numbers.
        torch.manual_seed(3)
        assert not torch.equal(plain.generator_state, torch.get_rng_state())
    for key, value in plain.metrics.items():
        assert observed.metrics[key] == value, key
    added = observed.metrics.keys() - plain.metrics.keys()
    assert "clipx/clip_fraction_low" in added and all(key.startswith(("clipx/", "clipx_sum/")) for key in added)
    assert not [key for key in added if "max" in key or "min" in key]


def small_batch(ratios, advantages, mask=None, old=-3.0):
    """Sequences of these ratios, each of one advantage; entropies of 1."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    old = torch.as_tensor(old, dtype=torch.float64).expand(ratio.shape).clone()
    return {
        "old_log_prob": old,
        "log_prob": old + ratio.log(),
        "advantages": torch.tensor(advantages, dtype=torch.float64)[:, None].expand(old.shape).clone(),
        "mask": torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool),
        "entropy": torch.ones_like(old),
    }


def by_region(name, *values, among):
    """A metric's expected values in each region, out of a number."""
    return {f"{name}/{region}": value / among for region, value in zip(REGIONS, values, strict=True)}


# A = 2: 0.5 is LP, 1.1 is M, 1.5 is HP and clipped.
# A = -1: 0.5 is LN and clipped, 1.5 is HN, 4 is HN and beyond the dual clip.
VANILLA_BATCH = small_batch([[0.5, 1.1, 1.5], [0.5, 1.5, 4.0]], [2.0, -1.0])


class MetricsByHand(NamedTuple):
    """What the metrics of an observed loss must be.

    Attributes:
        batch: of one micro-batch.
        metrics: the values, by their names without "clipx/".
        overrides: of the run.
    """

    batch: dict[str, torch.Tensor]
    metrics: dict[str, float]
    overrides: Sequence[str] = ()


BY_HAND = {
    "vanilla": MetricsByHand(
        batch=VANILLA_BATCH,
        overrides=OTHER_TERMS,
        metrics={
            "clip_fraction": 3 / 6,
            "clip_fraction_low": 1 / 6,
            "clip_fraction_high": 2 / 6,
            "ratio_mean": 9.1 / 6,
            "ppo_kl": -math.log(0.5 * 1.1 * 1.5 * 0.5 * 1.5 * 4) / 6,
            # |ratio * A| of the tokens with a gradient; no KL and no entropy term in it.
            **by_region("gradient_mass", 0, 0, 1.0, 1.5, 2.2, among=6),
            "contribution/positive": 3.2 / 6,
            "contribution/negative": 1.5 / 6,
            "squared_ratio": (0.25 + 1.21 + 2.25 + 0.25 + 2.25 + 16) / 6,
        },
    ),
    # exp of the mean log-ratio: 2 in the first and second sequence, with A > 0 and A < 0; 0.5 in the third, A < 0; 1 in
    # the fourth, whose last token does not count. The single tokens would fall elsewhere.
    "gspo": MetricsByHand(
        batch=small_batch(
            [[0.5, 8.0], [0.5, 8.0], [2.0, 0.125], [1.0, 9.0]],
            [2.0, -1, -1, 1],
            mask=[[1, 1], [1, 1], [1, 1], [1, 0]],
        ),
        overrides=[f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", *OTHER_TERMS],
        metrics={
            "clip_fraction": 4 / 7,
            "clip_fraction_low": 2 / 7,
            "clip_fraction_high": 2 / 7,
            # The second sequence's |s * A| of 2, the fourth's of 1, each a sixth of the loss: jagged.micro_batch says
            # that the mini-batch has 6 sequences.
            **by_region("gradient_mass", 0, 0, 0, 2, 1, among=6),
        },
    ),
    # The second token alone lost its gradient; the sequence's mean is on the other side.
    "geo_mean": MetricsByHand(
        batch=small_batch([[0.1, 2.0]], [1.0]),
        metrics={"clip_fraction_high": 1 / 2, "clip_fraction_low": 0},
    ),
    # A token without a gradient at ratio 1 is on neither side. Two sequences, so that covariances are not all 0.
    "clip_cov": MetricsByHand(
        batch=small_batch([[1.0] * 4] * 2, [2.0, -1.0], old=[-1.0, -2.0, -3.0, -4.0]),
        metrics={"clip_fraction": 1 / 8, "clip_fraction_low": 0, "clip_fraction_high": 0},
    ),
}


def metrics_of(function, batch):
    """The plugin's metrics of all rows of a batch, each of one micro-batch."""
    metrics = call(function, batch, rows=list(range(len(batch["mask"])))).metrics
    return {key.partition("/")[2]: values[0] for key, values in metrics.items() if key.startswith("clipx")}


@pytest.mark.parametrize("loss_mode", BY_HAND)
def test_metrics_by_hand(build_observed, loss_mode):
    case = BY_HAND[loss_mode]
    metrics = metrics_of(build_observed(loss_mode, *case.overrides), case.batch)
    for name, expected in case.metrics.items():
        assert metrics[name] == pytest.approx(expected, rel=1e-6), name


def test_rejected_tokens_are_not_counted_by_hand(build_plain, monkeypatch):
    # The second sequence is rejected, but in verl's count.
    data, output = micro_batch(VANILLA_BATCH, [0, 1], total=6)
    data["response_mask"].values()[3:] = False
    output["log_probs"].requires_grad_(True)
    monkeypatch.setattr("verl_clipx.training.worker.training_worker.get_device_id", lambda: "cpu")
    rejection = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.98_1.02")
    function = build_plain("vanilla", "+clipx=observe", *rejection)
    worker = Worker(function.keywords["config"], output)
    metrics = tu.get(worker.train_batch(data), "metrics")
    expected = {"ratio_mean": 3.1 / 3, "clip_fraction": 1 / 3}
    # |ratio * A|.
    expected |= by_region("gradient_mass", 0, 0, 1.0, 0, 2.2, among=3)
    assert {key: metrics[f"clipx/{key}"][0] for key in expected} == pytest.approx(expected)
    assert worker.step is None


@pytest.mark.slow
def test_only_the_losses_said_to_clip_by_sequence_do(build_observed):
    """In each sequence one token moved far, against the others: only a clip by sequence treats all of them alike."""
    batch = small_batch([[1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 1 / 9]], [1.0, -1.0])
    fractions = {loss_mode: metrics_of(build_observed(loss_mode), batch)["clip_fraction"] for loss_mode in LOSSES}
    assert {loss_mode for loss_mode, fraction in fractions.items() if fraction == 1} == SEQUENCE_LEVEL <= set(LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "kl_cov", "gpg"])
def test_numbers_that_are_not_finite_pass_through(build_plain, build_observed, loss_mode):
    for value in (math.nan, math.inf, -math.inf):
        batch = example()
        batch["advantages"][1, 2] = value
        batch["log_prob"][0, 1] = math.nan
        plain = call(build_plain(loss_mode, *OTHER_TERMS), batch)
        observed = call(build_observed(loss_mode, *OTHER_TERMS), batch)
        for actual, expected in zip(observed.tensors, plain.tensors, strict=True):
            assert torch.equal(actual.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
        masses = [observed.metrics[f"clipx/gradient_mass/{region}"][0] for region in REGIONS]
        assert not plain.loss.isfinite() and not math.isfinite(sum(masses))


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_one_host_sync_more_than_verls(build_plain, build_observed, loss_mode):
    batch = example(torch.float32)

    def count_host_syncs(function):
        log_prob = batch["log_prob"].clone().requires_grad_(True)
        data, output = micro_batch({**batch, "log_prob": log_prob}, ROWS)
        with counted_host_syncs() as counter:
            function(model_output=output, data=data)
        return len(counter.calls)

    of_plain = count_host_syncs(build_plain(loss_mode))
    assert count_host_syncs(build_observed(loss_mode)) == of_plain + 1


def test_a_loss_is_wrapped_once_and_only_in_a_run_that_observes(build_plain, build_observed, monkeypatch):
    batch = example()
    registered = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    # Another test of the process may have observed it.
    original = getattr(registered, "__wrapped__", registered)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "vanilla", original)
    build_observed("vanilla")
    wrapped = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    build_observed("vanilla")
    assert core_algos.POLICY_LOSS_REGISTRY["vanilla"] is wrapped is not original
    # Another run of the process: even inside a micro-batch of ours, nothing is added.
    plain = call(with_micro_batch(build_plain("vanilla"), Observe(), Schedule(), OptimizerStep), batch)
    data, output = micro_batch(batch, ROWS)
    with torch.no_grad():
        _, metrics_without_gradients = build_observed("vanilla")(output, data)
    for metrics in (plain.metrics, metrics_without_gradients):
        assert metrics and not [key for key in metrics if key.startswith("clipx/")]
    with pytest.raises(ValueError, match="Unsupported loss mode: vanila"):
        observe_registered("vanila")
