"""Each algorithm that polgrad registers, beside the same of ours through verl's registry, under each of polgrad's
aggregations: value and gradient in float64 on its own random ragged batches, and where the two differ on purpose. Not
covered: its KL terms and advantages, which are verl's here, and `token-sum`, which it has not.
"""

from collections.abc import Iterator
from dataclasses import replace

import polgrad
import pytest
import torch
from polgrad import Aggregation
from polgrad.losses import PolicyLossConfig, RatioKind, policy_loss
from polgrad.testing import random_batches
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

from tests.composition import built_once
from tests.golden.runs import registered_loss

from .against_verl import ACTOR

# Largest differences of rounding: of the loss, relative to the larger one; of a gradient, to the largest of a token.
ROUNDING = 1e-14
# What TOKEN_SUM_NORM divides by, here and there.
NORM_LENGTH = 9
AGGREGATIONS = {
    Aggregation.TOKEN_MEAN: "token-mean",
    Aggregation.SEQ_MEAN_TOKEN_MEAN: "seq-mean-token-mean",
    Aggregation.SEQ_MEAN_TOKEN_SUM: "seq-mean-token-sum",
    Aggregation.TOKEN_SUM_NORM: "seq-mean-token-sum-norm",
}
PPO = ("+clipx=grpo", "clipx.dual_clip=null")
# From polgrad's name of an algorithm to the overrides that choose the same one of ours.
OVERRIDES = {
    "ppo": PPO,
    "grpo": PPO,
    "dr_grpo": PPO,
    "reinforce_pp": PPO,
    "grpo_tis": PPO,
    "dapo": ("+clipx=dapo", "clipx.dual_clip=null"),
    "gspo": ("+clipx=gspo",),
    "gspo_token": ("+clipx=gspo",),
    "cispo": ("+clipx=cispo_minimax", "clipx.clip_high=1.2"),
    # Without a ratio: every weight is 1.
    "rloo": ("+clipx=topr", "clipx.negative_low=1"),
}


def make_batches() -> Iterator[dict[str, Tensor]]:
    """Yield ragged batches near ratio 1, where a sequence's bounds separate, and far from it."""
    for seed, gap in enumerate((2e-3, 0.5, 2.0)):
        yield from random_batches(4, ((6, 12), (3, 40)), seed=seed, max_gap=gap)


def compute_peers_loss(config: PolicyLossConfig, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return polgrad's loss, and its gradient on the log-probabilities."""
    logprobs = batch["logprobs"].clone().requires_grad_(True)
    tensors = {name: batch[name] for name in ("old_logprobs", "advantages", "response_mask")}
    if config.is_correction is not None:
        tensors["rollout_logprobs"] = batch["rollout_logprobs"]
    loss = policy_loss(config, logprobs=logprobs, **tensors).loss
    loss.backward()
    return loss.detach(), logprobs.grad


def compute_our_loss(
    overrides: tuple[str, ...], config: PolicyLossConfig, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the registered loss, and its gradient, under the aggregation and the correction of polgrad's config."""
    old_log_prob = batch["old_logprobs"]
    mask = batch["response_mask"]
    advantages = batch["advantages"]
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(old_log_prob)
    weights = None
    if (correction := config.is_correction) is not None:
        # verl's trainer makes the weights, and the loss multiplies by them.
        log_ratio = old_log_prob - batch["rollout_logprobs"]
        weights, *_ = compute_rollout_correction_weights(log_ratio, mask, correction.level, correction.cap)
    inputs = {
        "log_prob": batch["logprobs"],
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "response_mask": mask,
    }
    actor = built_once((*overrides, f"++{ACTOR}.loss_scale_factor={NORM_LENGTH}"))
    aggregation = AGGREGATIONS[config.aggregation]
    loss, gradient, _ = registered_loss(actor, inputs, loss_agg_mode=aggregation, rollout_is_weights=weights)
    return loss, gradient


def compare(overrides: tuple[str, ...], config: PolicyLossConfig, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest relative differences of the loss and of a token's gradient."""
    loss, gradient = compute_our_loss(overrides, config, batch)
    expected_loss, expected_gradient = compute_peers_loss(config, batch)
    largest_gradient = expected_gradient.abs().max().clamp(min=1e-300)
    loss_difference = (loss - expected_loss).abs() / expected_loss.abs().clamp(min=largest_gradient)
    gradient_difference = (gradient - expected_gradient).abs().max() / largest_gradient
    return float(loss_difference), float(gradient_difference)


def get_peers_config(name: str, aggregation: Aggregation | None = None, **clip: float | None) -> PolicyLossConfig:
    """Return the loss of an algorithm of polgrad's, without a KL term, which is verl's here.

    Args:
        aggregation: None for its own.
        **clip: changes of its clip.
    """
    config = polgrad.ALGORITHMS[name].loss
    config = replace(config, aggregation=aggregation or config.aggregation, norm_len=NORM_LENGTH, kl=None)
    if clip:
        config = replace(config, clip=replace(config.clip, **clip))
    return config


def test_each_algorithm_of_the_peer_is_compared_under_each_aggregation():
    assert OVERRIDES.keys() == polgrad.ALGORITHMS.keys()
    assert AGGREGATIONS.keys() == {*Aggregation}


@pytest.mark.parametrize("name", OVERRIDES)
def test_value_and_gradient_are_those_of_the_peer_under_every_aggregation(name):
    tokens_with_gradient = 0
    for aggregation in Aggregation:
        for batch in make_batches():
            config = get_peers_config(name, aggregation)
            differences = compare(OVERRIDES[name], config, batch)
            assert max(differences) <= ROUNDING, (aggregation, differences)
            _, gradient = compute_peers_loss(config, batch)
            tokens_with_gradient += int((gradient != 0).sum())
    assert tokens_with_gradient > 100


@pytest.mark.parametrize(
    ("group", "peers_name", "difference"),
    [
        pytest.param(
            "grpo",
            "grpo",
            {"ratio_cap": 3.0},
            id="verl's vanilla, and so grpo, has a dual clip of 3, the papers none",
        ),
        pytest.param("dapo", "dapo", {"ratio_cap": 3.0}, id="so has dapo"),
        pytest.param("cispo", "cispo", {"eps_low": 0.2}, id="cispo is verl's, with a lower bound"),
        pytest.param(
            "cispo_minimax",
            "cispo",
            {"eps_high": 0.28},
            id="MiniMax prints no upper bound, and ours is another choice",
        ),
    ],
)
def test_what_differs_on_purpose_is_this_alone(group, peers_name, difference):
    overrides = (f"+clipx={group}",)
    as_registered = get_peers_config(peers_name)
    with_difference = get_peers_config(peers_name, **difference)
    assert max(max(compare(overrides, as_registered, batch)) for batch in make_batches()) > 1e-3
    assert max(max(compare(overrides, with_difference, batch)) for batch in make_batches()) <= ROUNDING


def test_where_advantages_differ_within_a_sequence_gspo_is_the_peers_gspo_token():
    assert get_peers_config("gspo_token") == replace(get_peers_config("gspo"), ratio=RatioKind.SEQUENCE_TOKEN)
    # Wide bounds, inside which every sequence has a gradient.
    overrides = ("+clipx=gspo", "clipx.clip_low=0.01", "clipx.clip_high=20")
    by_token = get_peers_config("gspo_token", eps_low=0.99, eps_high=19.0)
    by_sequence = get_peers_config("gspo", eps_low=0.99, eps_high=19.0)
    for batch in make_batches():
        generator = torch.Generator().manual_seed(0)
        batch["advantages"] = torch.randn(batch["logprobs"].shape, dtype=torch.float64, generator=generator)
        assert max(compare(overrides, by_token, batch)) <= ROUNDING
        loss_difference, gradient_difference = compare(overrides, by_sequence, batch)
        assert loss_difference <= ROUNDING
        assert gradient_difference > 0.01
