"""What a loss makes of the tokens that rejection or a mask leaves, however the mini-batch is cut, by verl's ppo_loss.
Not covered: the criteria (tests/losses/modifiers/test_rejection.py, tests/losses/modifiers/test_masks.py), real engines
and ranks (tests/end_to_end), verl's rejection beside a mask.
"""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.utils.losses import ppo_loss

from tests.host_syncs import counted_host_syncs
from tests.training.worker.updates import SPLITS, WHOLE, loss_function, plan_with_extra_pass, train
from verl_clipx.losses.applying.loss import apply
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.losses.modifiers.masks import apply_mask_rule
from verl_clipx.run.config import build
from verl_clipx.run.keys import BYPASS, MINI_BATCH, ROLLOUT_PROMPTS, ROLLOUT_RS, TRAINER_MODE
from verl_clipx.run.schedule import schedule_of
from verl_clipx.training.worker.layout import TokenPass
from verl_clipx.training.worker.rejection import rejection_of
from verl_clipx.training.worker.step import OptimizerStep

CORRECTION = "algorithm.rollout_correction"
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=true"
# Criteria and thresholds. Each leaves some of the example's tokens, and all but the first some of its sequences.
REJECTIONS = {
    "tokens by ratio": ("token_k1", "0.6_1.6"),
    "geometric mean": ("seq_mean_k1", "0.9_1.3"),
    "k3": ("seq_mean_k3", 0.1),
    "tokens and sequences": ("token_k2,seq_max_k3", "0.1,0.3"),
}


def bypass_overrides(rejection):
    """Overrides of a run in bypass mode with a rejection."""
    criteria, threshold = REJECTIONS[rejection]
    return [
        f"{CORRECTION}.bypass_mode=True",
        LOG_PROBS_RETURNED,
        f'{CORRECTION}.rollout_rs="{criteria}"',
        f'{CORRECTION}.rollout_rs_threshold="{threshold}"',
    ]


def change_config(config, method="grpo", rejection=None, correction=None, **fields):
    """A composed configuration under another method, correction, and other keys of the actor: faster anew."""
    correction = dict(correction or {})
    if rejection is not None:
        correction["rejection"], correction["rejection_threshold"] = REJECTIONS[rejection]
    config = copy.copy(config)
    policy_loss = copy.copy(config.policy_loss)
    settings = build(method)
    record = policy_loss.run.record
    changed_correction = dataclasses.replace(record.correction, **correction)
    values = {
        BYPASS: changed_correction.bypass,
        ROLLOUT_RS: changed_correction.rejection,
        TRAINER_MODE: record.trainer.kind,
        ROLLOUT_PROMPTS: record.batch.prompts,
        MINI_BATCH: record.batch.mini_batch,
    }
    record = dataclasses.replace(record, correction=changed_correction, schedule=schedule_of(values, settings))
    object.__setattr__(policy_loss, "run", dataclasses.replace(policy_loss.run, record=record))
    object.__setattr__(policy_loss, "clipx", settings)
    object.__setattr__(policy_loss, "loss_mode", f"clipx_{method}")
    object.__setattr__(config, "policy_loss", policy_loss)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


@pytest.fixture
def bypass(actor):
    """`change_config` from a configuration in bypass mode."""
    return partial(change_config, actor("+clipx=grpo", *bypass_overrides("k3")))


def remaining_mask(batch, rejection):
    """The tokens that verl's own function leaves of a padded batch."""
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    return compute_rollout_rejection_mask(log_ratio, batch["mask"], *REJECTIONS[rejection])[0]


def train_update(config, batch, split=WHOLE, step=None, change=None):
    """Trains an update of a step that was planned, or else is planned here; returns the step and the result."""
    step = step or plan_with_extra_pass(config, batch, split)
    extra = dict(entropy=batch["entropy"], reference=batch["old_log_prob"] - 0.1)
    return step, train(loss_function(config, step), batch, split, change=change, **extra)


def recompute(config, batch, mask, decision=None, normaliser=None):
    """Decision and gradient under token-mean by the method's formulas, of the tokens in a mask."""
    settings = config.policy_loss.clipx
    # As tests/jagged.py names prompts and has the rollout's.
    known = batch | {"group": torch.arange(6) // 2}
    known["rollout_log_prob"] = batch.get("sampler_log_prob", batch["old_log_prob"])
    asked_for = {name: known[name] for name in settings.method.asks_for}
    inputs = Inputs(*(batch[name] for name in ("log_prob", "old_log_prob", "advantages")), mask, **asked_for)
    applied = apply(settings.method, settings.shaping, inputs, decision)
    total = batch["mask"].sum() if normaliser is None else normaliser
    return applied.decision, torch.where(mask, -applied.weight * applied.tokens.advantages, 0.0) / total


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def train_each_split(config, batch, mask):
    """Trains an update of each split, whose decision and gradient must be of the tokens in a mask; yields metrics."""
    decision, gradient = recompute(config, batch, mask)
    for split in (WHOLE, *SPLITS.values()):
        step, result = train_update(config, batch, split)
        if config.policy_loss.clipx.adaptive:
            torch.testing.assert_close(step.decision, decision, rtol=1e-12, atol=1e-12)
        assert_close(result.gradient, gradient)
        yield result.metrics


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("rejection", REJECTIONS)
def test_grpo_is_verls_own_bypass_loss(bypass, rejection, aggregation):
    fields = dict(loss_agg_mode=aggregation, use_kl_loss=True, entropy_coeff=0.1)
    own_config = bypass("grpo", rejection, **fields)
    config_of_verl = bypass("grpo", rejection, **fields)
    # As apply_bypass_mode does, from one of verl's presets.
    criteria, threshold = REJECTIONS[rejection]
    preset = dataclasses.replace(RolloutCorrectionConfig.bypass_ppo_clip_geo_rs(str(threshold)), rollout_rs=criteria)
    object.__setattr__(config_of_verl.policy_loss, "loss_mode", "bypass_mode")
    object.__setattr__(config_of_verl.policy_loss, "rollout_correction", preset)
    batch = example()
    extra = dict(entropy=batch["entropy"], reference=batch["old_log_prob"] - 0.1)
    actual = train(loss_function(own_config, OptimizerStep(entropy_wanted=True)), batch, **extra)
    expected = train(partial(ppo_loss, config=config_of_verl), batch, **extra)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(actual.gradient, expected.gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "rejection"),
    [*((method, "tokens and sequences") for method in BUILT_IN), *(("acpo", rejection) for rejection in REJECTIONS)],
)
def test_every_methods_bounds_gradient_and_metrics_are_of_the_tokens_that_remain(bypass, method, rejection):
    config = bypass(method, rejection)
    batch = example()
    mask = remaining_mask(batch, rejection)
    assert 0 < mask.sum() < batch["mask"].sum()
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[mask]
    expected = {
        "clipx/rejected_fraction": 1 - int(mask.sum()) / int(batch["mask"].sum()),
        "clipx/ratio_mean": ratio.mean().item(),
        "clipx_sum/squared_ratio": ratio.square().mean().item(),
    }
    whole = None
    for metrics in train_each_split(config, batch, mask):
        own = {key: value for key, value in metrics.items() if key.startswith("clipx/")}
        whole = whole or own
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-6)
        assert method not in ("grpo", "acpo") or own == pytest.approx(whole, rel=1e-6, abs=1e-9)
    if method == "acpo":
        # With the rejected tokens bounds would be others.
        decision_of_all_tokens, _ = recompute(config, batch, batch["mask"])
        decision_of_remaining, _ = recompute(config, batch, mask)
        assert not torch.allclose(decision_of_all_tokens, decision_of_remaining, rtol=1e-3)


@pytest.mark.parametrize("over", ["sequence", "mini_batch"])
def test_selection_is_among_the_tokens_that_remain(actor, over):
    overrides = ("+clipx/select=high_entropy", f"clipx.select.over={over}", "clipx.select.ratio=0.4")
    config = actor("+clipx=grpo", *overrides, *bypass_overrides("tokens by ratio"))
    batch = example()
    mask = remaining_mask(batch, "tokens by ratio")
    chosen = config.policy_loss.clipx.select.selected(batch["entropy"], mask)
    assert 0 < chosen.sum() < mask.sum() and config.policy_loss.run.record.schedule.selects_by_pass
    step, result = train_update(config, batch, SPLITS["ranks"])
    assert float(step.selected_tokens) == int(chosen.sum())
    assert_close(result.gradient, recompute(config, batch, chosen, normaliser=chosen.sum())[1])


def test_a_pass_of_lopti_rejects_by_whole_sequences(actor):
    config = actor("+clipx=acpo", "+clipx/update=lopti", *bypass_overrides("k3"))
    batch = example()
    low = (batch["old_log_prob"].exp() <= 0.3) & batch["mask"]
    mask = remaining_mask(batch, "k3")
    assert 0 < (mask & low).sum() < low.sum()
    expected, _ = recompute(config, batch, mask & low)
    _, gradient = recompute(config, batch, mask, decision=expected)
    step = plan_with_extra_pass(config, batch, SPLITS["ranks"], TokenPass("low", 0.3, True))
    _, result = train_update(config, batch, SPLITS["ranks"], step)
    torch.testing.assert_close(step.decision, expected, rtol=1e-12, atol=1e-12)
    assert_close(result.gradient, torch.where(low, gradient, 0.0))
    assert result.metrics["clipx/rejected_fraction"] == pytest.approx(1 - int((mask & low).sum()) / int(low.sum()))


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_token_that_is_not_finite_is_not_rejected_and_rejection_waits_for_no_accelerator(bypass, rejection):
    config = bypass("grpo", rejection)
    for value in (torch.nan, torch.inf, -torch.inf):
        batch = example()
        batch["old_log_prob"][0, 0] = value
        _, result = train_update(config, batch)
        assert not result.gradient[0, 0].isfinite()
    batch = example()
    rejection_rule = rejection_of(config.policy_loss)
    tensors = [batch[name] for name in ("mask", "log_prob", "old_log_prob")]
    assert rejection_rule.remaining(*(tensor.to("meta") for tensor in tensors)).shape == batch["mask"].shape
    with counted_host_syncs() as counter:
        rejection_rule.remaining(*tensors)
    assert counter.count == 0, counter.calls


@pytest.mark.parametrize(
    ("method", "aggregation"), [*((method, "token-mean") for method in BUILT_IN), ("acpo", "seq-mean-token-mean")]
)
def test_weights_and_rejection_of_decoupled_mode_go_with_every_method(bypass, method, aggregation):
    config = bypass(method, correction={"bypass": False, "weights": "token"}, loss_agg_mode=aggregation)
    settings = config.policy_loss.clipx
    batch = example()
    all_tokens = batch["mask"]
    weights = torch.rand(all_tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[~all_tokens] = torch.nan
    # As verl's trainer leaves it: zeros in the middle of response_mask, all tokens in verl's own count.
    mask = all_tokens & (torch.arange(all_tokens.shape[1]) % 3 != 1) & (torch.arange(6) != 2)[:, None]
    _, gradient = recompute(config, batch, mask, normaliser=1)
    # A weight is no part of what a micro-batch decides.
    object.__setattr__(settings, "scope", "micro_batch")
    ones = torch.ones_like(gradient, requires_grad=True)
    info = dict(dp_size=1, batch_num_tokens=int(all_tokens.sum()), global_batch_size=6)
    agg_loss(ones, mask, aggregation, **info).backward()

    def weigh_and_reject(data):
        data["rollout_is_weights"] = weights
        data["response_mask"] = mask.long()

    _, result = train_update(config, batch, step=OptimizerStep(), change=weigh_and_reject)
    assert_close(result.gradient, torch.where(mask, gradient * weights * ones.grad, 0.0))


# By rule, parameters by which it takes out some of the example's tokens.
MASKS = {
    "opsm": ("clipx.mask.delta=0.01",),
    "icepop": ("clipx.mask.low=0.9", "clipx.mask.high=1.1"),
}


@pytest.mark.parametrize("rule", MASKS)
@pytest.mark.parametrize("method", ["grpo", "acpo"])
def test_tokens_that_a_mask_takes_out_have_no_gradient_and_verls_normaliser_stays(actor, method, rule):
    config = actor(f"+clipx={method}", f"+clipx/mask={rule}", *MASKS[rule], LOG_PROBS_RETURNED)
    batch = example()
    noise = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # The sampler differs from the old policy.
    batch["rollout_log_prob"] = batch["sampler_log_prob"] = batch["old_log_prob"] + 0.2 * noise
    names = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_log_prob")
    mask = apply_mask_rule(config.policy_loss.clipx.mask, Inputs(**{name: batch[name] for name in names}))
    taken_out = batch["mask"] & ~mask
    assert mask.any() and taken_out.any()
    signs = {"negative": batch["advantages"] < 0, "positive": batch["advantages"] > 0}
    expected = {}
    for sign, has_sign in signs.items():
        expected[f"masked_fraction/{sign}"] = float((taken_out & has_sign).sum() / batch["mask"].sum())
    expected["ratio_mean"] = float((batch["log_prob"] - batch["old_log_prob"]).exp()[mask].mean())
    for metrics in train_each_split(config, batch, mask):
        assert {name: metrics[f"clipx/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)
        masked_sequences = [metrics[f"clipx/masked_sequences/{sign}"] for sign in signs]
        assert sum(masked_sequences) == pytest.approx(float((batch["mask"].any(-1) & ~mask.any(-1)).sum()))
