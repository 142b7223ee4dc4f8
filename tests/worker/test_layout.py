"""Lopti's pass through verl's own ppo_loss: what a token outside the pass still contributes.

Covers: the places of response tokens in the model's output; gradients, KL and entropy terms of both passes; that the
normaliser stays that of all tokens under every aggregation. Not covered: the split itself
(tests/modifiers/test_lopti.py), golden vectors (test_golden_tokens.py), the two passes in a run (tests/end_to_end).
"""

from functools import partial

import pytest
import torch
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.jagged import micro_batch
from verl_clipx.check.contract import example
from verl_clipx.worker.layout import TokenPass, in_model_output, padded, response_part, restrict
from verl_clipx.worker.loss_function import with_micro_batch
from verl_clipx.worker.step import OptimizerStep

ROWS = [0, 1, 2, 3, 4]
ETA = 0.25


def test_chosen_tokens_are_found_in_the_models_output():
    data, output = micro_batch(example(), ROWS)
    chosen = torch.rand(5, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    values = output["log_probs"].values()
    places = in_model_output(chosen.to(torch.uint8), data, values.shape[0]).bool()
    marked = torch.nested.nested_tensor_from_jagged(places.double(), offsets=output["log_probs"].offsets())
    lengths = torch.tensor([9, 7, 5, 3, 1])
    inside = torch.arange(9) < lengths[:, None]
    assert torch.equal(no_padding_2_padding(marked, data).bool(), chosen & inside)
    assert int(places.sum()) == int((chosen & inside).sum())


@pytest.mark.parametrize("jagged", [True, False])
def test_the_response_part_is_what_verl_cuts_out(jagged):
    data, output = micro_batch(example(), ROWS)
    expected = no_padding_2_padding(output["log_probs"], data)
    log_probs = output["log_probs"] if jagged else output["log_probs"].values()
    assert torch.equal(response_part(log_probs, data, expected.shape[1]), expected)


def loss_and_gradient(config, batch, step, **extra):
    """verl's whole loss on all rows, and its gradient in the padded layout."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    data, output = micro_batch({**batch, "log_prob": log_prob}, ROWS, **extra)
    wrapped = with_micro_batch(partial(ppo_loss, config=config), config.policy_loss.clipx, lambda: step)
    loss, metrics = wrapped(model_output=output, data=data)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


def step_of(name, batch):
    token_pass = TokenPass(name, ETA, True)
    data, _ = micro_batch(batch, ROWS)
    return OptimizerStep(token_pass, counted_tokens=float(token_pass.tokens(data).sum()), entropy_wanted=True)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_gradients_of_both_passes_add_up_to_the_plain_one(actor, aggregation):
    config = actor(
        "+clipx=grpo",
        f"actor_rollout_ref.actor.loss_agg_mode={aggregation}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.3",
    )
    batch = example()
    reference = batch["log_prob"] - 0.3
    plain_loss, plain, _ = loss_and_gradient(config, batch, OptimizerStep(), reference=reference)
    low_loss, low, _ = loss_and_gradient(config, batch, step_of("low", batch), reference=reference)
    high_loss, high, _ = loss_and_gradient(config, batch, step_of("high", batch), reference=reference)
    torch.testing.assert_close(low + high, plain)
    torch.testing.assert_close(low_loss + high_loss, plain_loss)
    is_low = batch["old_log_prob"].exp() <= ETA
    assert not low[~is_low].any() and not high[is_low].any()
    assert low.any() and high.any()


def test_entropy_outside_the_pass_counts_nothing(actor):
    config = actor("+clipx=grpo", "actor_rollout_ref.actor.entropy_coeff=0.5")
    batch = example()
    entropy = torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = {}
    for name in ("low", "high"):
        _, _, metrics = loss_and_gradient(config, batch, step_of(name, batch), entropy=entropy)
        values[name] = metrics["actor/entropy_loss"].aggregate()
    expected = entropy[batch["mask"]].sum() / batch["mask"].sum()
    assert values["low"] + values["high"] == pytest.approx(float(expected))
    assert min(values.values()) > 0


def test_region_metrics_are_shares_of_the_passs_tokens(actor):
    config = actor("+clipx=grpo", "clipx.metrics=all")
    batch = example()
    for name in ("low", "high"):
        _, _, metrics = loss_and_gradient(config, batch, step_of(name, batch))
        names = ("clip_fraction_low", "clip_fraction_high", *(f"region_fraction/{name}" for name in ("LP", "HN", "M")))
        shares = [metrics[f"clipx/{name}"].aggregate() for name in names]
        assert sum(shares) == pytest.approx(1)
        inside = batch["mask"] & ((batch["old_log_prob"].exp() <= ETA) == (name == "low"))
        ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[inside].mean()
        assert metrics["clipx/ratio_mean"].aggregate() == pytest.approx(float(ratio), rel=1e-6)


def test_what_verl_gave_is_not_changed():
    batch = example()
    data, output = micro_batch(batch, ROWS, reference=batch["log_prob"])
    before = padded(data["advantages"]).clone()
    restrict(output, data, torch.zeros(5, 9, dtype=torch.bool))
    assert torch.equal(padded(data["advantages"]), before)
    assert output["log_probs"].is_nested
