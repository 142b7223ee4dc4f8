"""Each algorithm that polgrad registers, beside the same of ours through verl's registry, under every aggregation of
its: value and gradient in float64 on its own random ragged batches, and where the two differ on purpose. Not covered:
its KL terms and advantages, which are verl's here, and `token-sum`, which it has not.
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

# Of the larger of the two, and of the largest gradient of a token.
SAME = 1e-14
LONGEST = 9
MODES = {
    Aggregation.TOKEN_MEAN: "token-mean",
    Aggregation.SEQ_MEAN_TOKEN_MEAN: "seq-mean-token-mean",
    Aggregation.SEQ_MEAN_TOKEN_SUM: "seq-mean-token-sum",
    Aggregation.TOKEN_SUM_NORM: "seq-mean-token-sum-norm",
}
PPO = ("+clipx=grpo", "clipx.dual_clip=null")
# What chooses the same of ours.
OURS = {
    **dict.fromkeys(("ppo", "grpo", "dr_grpo", "reinforce_pp", "grpo_tis"), PPO),
    "dapo": ("+clipx=dapo", "clipx.dual_clip=null"),
    **dict.fromkeys(("gspo", "gspo_token"), ("+clipx=gspo",)),
    "cispo": ("+clipx=cispo_minimax", "clipx.clip_high=1.2"),
    # Without a ratio: every weight is 1.
    "rloo": ("+clipx=topr", "clipx.negative_low=1"),
}


def batches() -> Iterator[dict[str, Tensor]]:
    """Ragged batches near ratio 1, where a sequence's bounds separate, and far from it."""
    for seed, gap in enumerate((2e-3, 0.5, 2.0)):
        yield from random_batches(4, ((6, 12), (3, 40)), seed=seed, max_gap=gap)


def theirs(config: PolicyLossConfig, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_(True)
    others = {key: of for key, of in batch.items() if key not in ("logprobs", "ref_logprobs", "rollout_logprobs")}
    if config.is_correction is not None:
        others["rollout_logprobs"] = batch["rollout_logprobs"]
    loss = policy_loss(config, logprobs=logprobs, **others).loss
    loss.backward()
    return loss.detach(), logprobs.grad


def ours(words: tuple[str, ...], config: PolicyLossConfig, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    old, advantages, mask = batch["old_logprobs"], batch["advantages"], batch["response_mask"]
    tensors = {"log_prob": batch["logprobs"], "old_log_prob": old, "response_mask": mask}
    tensors["advantages"] = advantages if advantages.ndim == 2 else advantages[:, None].expand_as(old)
    weights = None
    if (correction := config.is_correction) is not None:
        # verl's trainer makes the weights, and the loss multiplies by them.
        log_ratio = old - batch["rollout_logprobs"]
        weights = compute_rollout_correction_weights(log_ratio, mask, correction.level, correction.cap)[0]
    words = (*words, f"++{ACTOR}.loss_scale_factor={LONGEST}")
    mode = MODES[config.aggregation]
    return registered_loss(built_once(words), tensors, loss_agg_mode=mode, rollout_is_weights=weights)[:2]


def difference(words: tuple[str, ...], config: PolicyLossConfig, batch: dict[str, Tensor]) -> tuple[float, float]:
    """The largest difference of the loss and of a token's gradient, each of the size of what is compared."""
    (loss, gradient), (expected, expected_gradient) = ours(words, config, batch), theirs(config, batch)
    size = expected_gradient.abs().max().clamp(min=1e-300)
    apart = (loss - expected).abs() / expected.abs().clamp(min=size)
    return float(apart), float((gradient - expected_gradient).abs().max() / size)


def loss_of(name: str, aggregation: Aggregation | None = None) -> PolicyLossConfig:
    """An algorithm's loss under an aggregation, None for its own, without a KL term: that is verl's here."""
    config = polgrad.ALGORITHMS[name].loss
    return replace(config, aggregation=aggregation or config.aggregation, norm_len=LONGEST, kl=None)


def test_each_algorithm_of_the_peer_is_compared():
    assert OURS.keys() == polgrad.ALGORITHMS.keys() and MODES.keys() == {*Aggregation}


@pytest.mark.parametrize("name", OURS)
def test_value_and_gradient_are_those_of_the_peer_under_every_aggregation(name):
    trained = 0
    for aggregation in Aggregation:
        for batch in batches():
            config = loss_of(name, aggregation)
            found = difference(OURS[name], config, batch)
            assert max(found) <= SAME, (aggregation, found)
            gradient = theirs(config, batch)[1]
            trained += int((gradient != 0).sum())
    assert trained > 100


def changed(name: str, **clip: float | None) -> PolicyLossConfig:
    config = loss_of(name)
    return replace(config, clip=replace(config.clip, **clip))


# From what differs on purpose to our group, the peer's loss as it registers it, and the same with that difference.
ON_PURPOSE = {
    "verl's vanilla, and so grpo, has a dual clip of 3, the papers none": (
        ("+clipx=grpo",),
        loss_of("grpo"),
        changed("grpo", ratio_cap=3.0),
    ),
    "so has dapo": (("+clipx=dapo",), loss_of("dapo"), changed("dapo", ratio_cap=3.0)),
    "cispo is verl's, with a lower bound": (("+clipx=cispo",), loss_of("cispo"), changed("cispo", eps_low=0.2)),
    "MiniMax prints no upper bound, and ours is another choice": (
        ("+clipx=cispo_minimax",),
        loss_of("cispo"),
        changed("cispo", eps_high=0.28),
    ),
}


@pytest.mark.parametrize("words, registered, same", ON_PURPOSE.values(), ids=ON_PURPOSE)
def test_what_differs_on_purpose_is_this_alone(words, registered, same):
    apart = [(difference(words, registered, batch), difference(words, same, batch)) for batch in batches()]
    assert max(max(before) for before, _ in apart) > 1e-3
    assert max(max(after) for _, after in apart) <= SAME


def test_where_advantages_differ_within_a_sequence_gspo_is_the_peers_gspo_token():
    token, sequence = loss_of("gspo_token"), loss_of("gspo")
    assert token == replace(sequence, ratio=RatioKind.SEQUENCE_TOKEN)
    for batch in batches():
        generator = torch.Generator().manual_seed(0)
        batch["advantages"] = torch.randn(batch["logprobs"].shape, dtype=torch.float64, generator=generator)
        # Wide bounds, inside which every sequence has a gradient.
        words = ("+clipx=gspo", "clipx.clip_low=0.01", "clipx.clip_high=20")
        wide = {"eps_low": 0.99, "eps_high": 19.0}
        token, sequence = (replace(one, clip=replace(one.clip, **wide)) for one in (token, sequence))
        assert max(difference(words, token, batch)) <= SAME
        loss, gradient = difference(words, sequence, batch)
        assert loss <= SAME and gradient > 0.01
