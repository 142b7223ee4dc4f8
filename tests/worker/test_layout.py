"""Lopti's pass through verl's own ppo_loss: what a token outside the pass still contributes.

Covers: the places of response tokens in the model's output; gradients, KL and entropy terms of both passes; that the
normaliser stays that of all tokens under every aggregation. Not covered: the split itself
(tests/modifiers/test_lopti.py), golden vectors (test_golden_tokens.py), the two passes in a run (tests/end_to_end).
"""

import pytest
import torch
from verl.workers.utils.padding import no_padding_2_padding

from tests.jagged import micro_batch
from tests.worker.updates import loss_function, train
from verl_clipx.check.contract import example
from verl_clipx.worker.layout import TokenPass, in_model_output, pad_rows, response_part, restrict
from verl_clipx.worker.step import OptimizerStep

ROWS = [0, 1, 2, 3, 4]
ETA = 0.25
ACTOR = "actor_rollout_ref.actor"


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


def passes(actor, name=None, *overrides, entropy=None):
    """An update through verl's whole loss: Lopti's pass of that name, or one over all tokens."""
    batch, token_pass = example(), TokenPass(name, ETA, True) if name else None
    counted = float(token_pass.tokens(micro_batch(batch, ROWS)[0]).sum()) if name else None
    step = OptimizerStep(token_pass, counted_tokens=counted, entropy_wanted=True)
    extra = dict(entropy=entropy, reference=batch["log_prob"] - 0.3)
    return train(loss_function(actor("+clipx=grpo", *overrides), step), batch, [[ROWS]], **extra)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_gradients_of_both_passes_add_up_to_the_plain_one(actor, aggregation):
    terms = (f"{ACTOR}.loss_agg_mode={aggregation}", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.3")
    plain, low, high = (passes(actor, name, *terms) for name in (None, "low", "high"))
    torch.testing.assert_close(low.gradient + high.gradient, plain.gradient)
    torch.testing.assert_close(low.loss + high.loss, plain.loss)
    is_low = example()["old_log_prob"].exp() <= ETA
    assert not low.gradient[~is_low].any() and not high.gradient[is_low].any()
    assert low.gradient.any() and high.gradient.any()


def test_entropy_outside_the_pass_counts_nothing(actor):
    mask = example()["mask"]
    entropy = torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    trained = (passes(actor, name, f"{ACTOR}.entropy_coeff=0.5", entropy=entropy) for name in ("low", "high"))
    values = [one.metrics["actor/entropy_loss"] for one in trained]
    assert sum(values) == pytest.approx(float(entropy[mask].sum() / mask.sum())) and min(values) > 0


def test_region_metrics_are_shares_of_the_passs_tokens(actor):
    batch = example()
    for name in ("low", "high"):
        metrics = passes(actor, name, "clipx.metrics=all").metrics
        names = ("clip_fraction_low", "clip_fraction_high", *(f"region_fraction/{name}" for name in ("LP", "HN", "M")))
        assert sum(metrics[f"clipx/{name}"] for name in names) == pytest.approx(1)
        inside = batch["mask"] & ((batch["old_log_prob"].exp() <= ETA) == (name == "low"))
        ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()[inside].mean()
        assert metrics["clipx/ratio_mean"] == pytest.approx(float(ratio), rel=1e-6)


def test_what_verl_gave_is_not_changed():
    data, output = micro_batch(example(), ROWS, reference=example()["log_prob"])
    before = pad_rows(data["advantages"]).clone()
    restrict(output, data, torch.zeros(5, 9, dtype=torch.bool))
    assert torch.equal(pad_rows(data["advantages"]), before) and output["log_probs"].is_nested
