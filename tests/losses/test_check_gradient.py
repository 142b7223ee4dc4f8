"""Published faults of other trainers' losses, each by its own formula and autograd, and what `check_gradient` says of
them. Not covered: the faults that docs/elsewhere.md calls out of reach; the comparison in a run
(tests/training/worker/test_receipt.py).
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, where

from verl_clipx import check_gradient, clip_loss


def make_tokens(dtype=torch.float64):
    """Return log_prob, old_log_prob, advantages of both signs, a ragged mask and the sampler's log-probabilities."""
    torch.manual_seed(1)
    old = -torch.rand(8, 24, dtype=torch.float64) * 2 - 0.1
    current = old + 0.5 * torch.randn(8, 24, dtype=torch.float64)
    rollout = old + 0.05 * torch.randn(8, 24, dtype=torch.float64)
    advantages = torch.tensor([1.5, -1.0, 0.5, -0.7, 2.0, -1.2, 0.9, -0.4], dtype=torch.float64)[:, None].repeat(1, 24)
    mask = torch.arange(24) < torch.tensor([24, 20, 7, 15, 24, 11, 3, 18])[:, None]
    return current.to(dtype), old.to(dtype), advantages.to(dtype), mask, rollout.to(dtype)


# Trainers' losses, each a number: p, old, A, mask and rollout are the tensors of `make_tokens`.


def surrogate(p, old, A, low=0.8, high=1.28, dual_clip=None):
    """Return PPO's clipped loss of each token."""
    ratio = (p - old).exp()
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(low, high))
    if dual_clip is None:
        return loss
    return where(A < 0, torch.minimum(loss, -A * dual_clip), loss)


def average(loss, mask, denominator=None):
    """Return the loss's sum over the mask, divided by a number, None for that of its tokens."""
    if denominator is None:
        denominator = mask.sum()
    return where(mask, loss, 0).sum() / denominator


def make_ppo_trainer(denominator=None, factor=1.0, **clip):
    """Return a trainer, which is dapo's without a dual clip unless it is told otherwise."""

    def compute_loss(p, old, A, mask, rollout):
        return factor * average(surrogate(p, old, A, **clip), mask, denominator)

    return compute_loss


def ratio_to_the_sampler(p, old, A, mask, rollout):
    return average(surrogate(p, rollout, A), mask)


def mean_of_sequences_means(p, old, A, mask, rollout):
    of_tokens = where(mask, surrogate(p, old, A), 0)
    return (of_tokens.sum(-1) / mask.sum(-1)).mean()


def padding_counted(p, old, A, mask, rollout):
    return surrogate(p, old, A).sum() / mask.sum()


def sum_of_ratios_as_correction(p, old, A, mask, rollout):
    weights = where(mask, (old - rollout).exp(), 0).sum(-1, keepdim=True)
    return average(surrogate(p, old, A) * weights, mask)


def no_weight_at_all(p, old, A, mask, rollout):
    return average(-A * p, mask)


def opsm_by_token(p, old, A, mask, rollout):
    is_masked = (A < 0) & (rollout - p.detach() > 0.05)
    return average(surrogate(p, old, A) * ~is_masked, mask)


def overflow_of_a_dropped_token(p, old, A, mask, rollout):
    is_dropped = torch.arange(24) == 2
    ratio = (p - where(is_dropped, -1e4, old)).exp()
    return average(where(is_dropped, 0, -A) * ratio * ~is_dropped, mask)


def gradient_without_advantage(p, old, A, mask, rollout):
    return average(surrogate(p, old, A) - (A == 0) * p, mask)


def compute_gradient(trainer, log_prob, *others):
    """Return the gradient of a trainer's loss with respect to log_prob."""
    leaf = log_prob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(trainer(leaf, *others), leaf)
    return gradient


def product_of_ratios(old, rollout, mask):
    return where(mask, old - rollout, 0).sum(-1, keepdim=True).exp()


def token_ratios(old, rollout, mask):
    return (old - rollout).exp()


def hundredth(old, rollout, mask):
    return torch.full_like(old, 0.01)


def one_over_tokens(old, rollout, mask):
    return 1 / mask.sum()


def check_trainer(trainer, announced, *, dtype=torch.float64, mask=None, first_advantage=None):
    """Return the verdict on a trainer's gradient.

    Args:
        announced: keywords of check_gradient, with functions of old, rollout and mask in the place of tensors.
        mask: where another one than that of `make_tokens` is trained and announced.
        first_advantage: another one of the first token.
    """
    log_prob, old, advantages, mask_of_all, rollout = make_tokens(dtype)
    if mask is None:
        mask = mask_of_all
    if first_advantage is not None:
        advantages[0, 0] = first_advantage
    gradient = compute_gradient(trainer, log_prob, old, advantages, mask, rollout)
    keywords = {}
    for key, value in announced.items():
        keywords[key] = value(old, rollout, mask) if inspect.isfunction(value) else value
    return check_gradient(log_prob, old, advantages, mask, gradient, rollout_log_prob=rollout, **keywords)


DAPO = {"loss": "dapo", "dual_clip": None}
OPSM = {"loss": clip_loss("dapo", dual_clip=None, mask={"rule": "opsm", "delta": 0.05})}


@dataclass(frozen=True)
class Fault:
    """A trainer that does not compute what was announced.

    Args:
        trainer: its loss.
        pattern: words of the verdict's pattern.
        announced, first_advantage: as of `check_trainer`.
    """

    trainer: Callable[..., Tensor]
    pattern: str
    announced: dict[str, Any] = field(default_factory=lambda: DAPO)
    first_advantage: float | None = None


# Of published faults the names are those of their threads.
FAULTS = {
    "trl#6369": Fault(
        trainer=make_ppo_trainer(denominator=244),
        pattern="where the announced gradient is not 0, the trainer's is 0.5 times as large",
    ),
    "SkyRL#1315, miles#1829": Fault(trainer=ratio_to_the_sampler, pattern="another gradient at"),
    "unsloth-zoo#870": Fault(
        trainer=sum_of_ratios_as_correction,
        announced=DAPO | {"correction": product_of_ratios},
        pattern="another gradient at",
    ),
    "unsloth-zoo#870, VESPO": Fault(
        trainer=no_weight_at_all, announced={"loss": "vespo"}, pattern="another gradient at"
    ),
    "Liger-Kernel#1082": Fault(
        trainer=make_ppo_trainer(),
        announced=DAPO | {"correction": hundredth},
        pattern="the trainer's is 100 times as large",
    ),
    "slime#2247": Fault(
        trainer=make_ppo_trainer(),
        announced={"loss": "dapo", "dual_clip": 1.5},
        pattern="unannounced gradient at 21 tokens with A < 0 and rat",
    ),
    "slime#1917": Fault(trainer=opsm_by_token, announced=OPSM, pattern="with A < 0 and ratios from"),
    "verl#4912, #4272": Fault(
        trainer=make_ppo_trainer(dual_clip=3.0),
        announced={"loss": "dapo", "correction": token_ratios},
        pattern="another gradient at",
    ),
    "prime-rl#2973, Soup#342": Fault(
        trainer=overflow_of_a_dropped_token,
        announced=DAPO | {"clip_low": None, "clip_high": None},
        pattern="that is not finite at",
    ),
    # No thread reports these.
    "a symmetric clip": Fault(
        trainer=make_ppo_trainer(high=1.2), pattern="no gradient at 4 tokens with A > 0 and ratios from 1.2"
    ),
    "no clip": Fault(trainer=make_ppo_trainer(low=0, high=1e9), pattern="an unannounced gradient at"),
    "a mean of means": Fault(trainer=mean_of_sequences_means, pattern="another gradient at"),
    "the objective": Fault(trainer=make_ppo_trainer(factor=-1), pattern="the trainer's is -1 times as large"),
    "no gradient": Fault(trainer=make_ppo_trainer(factor=0), pattern="no gradient at"),
    "a wider bound": Fault(
        trainer=make_ppo_trainer(high=1.5), pattern="an unannounced gradient at 4 tokens with A > 0 and ratios from 1.2"
    ),
    "a narrower bound": Fault(
        trainer=make_ppo_trainer(low=0.9), pattern="no gradient at 3 tokens with A < 0 and ratios from 0.8"
    ),
    "padding": Fault(trainer=padding_counted, pattern="tokens outside the mask and ratios from"),
    "a token without advantage": Fault(
        trainer=gradient_without_advantage,
        first_advantage=0.0,
        pattern="an unannounced gradient at 1 tokens with A = 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_and_its_tokens_are_named(fault):
    verdict = check_trainer(fault.trainer, fault.announced, first_advantage=fault.first_advantage)
    assert not verdict and len(verdict.tokens) > 0 and fault.pattern in str(verdict), str(verdict)
    assert math.isinf(verdict.difference) == ("not finite" in fault.pattern)
    sequence, token = verdict.tokens[0].tolist()
    assert f"first (sequence:token) {sequence}:{token}" in str(verdict)


def test_rejected_tokens_that_stay_in_the_denominator_are_found():
    # verl#4852: rejection in bypass mode changes the numerator's mask alone.
    *_, whole_mask, _ = make_tokens()
    trainer = make_ppo_trainer(denominator=whole_mask.sum())
    remaining_mask = whole_mask & (torch.arange(24) % 3 > 0)
    verdict = check_trainer(trainer, DAPO, mask=remaining_mask)
    assert "where the announced gradient is not 0, the trainer's is 0.6557 times as large" in verdict.pattern


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_announced_loss_agrees_in_every_dtype(dtype):
    def trainer(p, old, A, mask, rollout):
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return make_ppo_trainer(dual_clip=3.0)(p.to(wide_dtype), old.to(wide_dtype), A.to(wide_dtype), mask, rollout)

    for aggregation in ("token-mean", one_over_tokens):
        verdict = check_trainer(trainer, {"loss": "dapo", "aggregation": aggregation}, dtype=dtype)
        assert verdict and len(verdict.tokens) == 0 and "is the announced one" in str(verdict), str(verdict)


@pytest.mark.filterwarnings("ignore:what .* clips follows")
@pytest.mark.parametrize("name", ["acpo", "m2po", "kl_cov", "gspo", "dro"])
def test_our_own_losses_agree_with_what_they_announce(name):
    def trainer(p, old, A, mask, rollout):
        per_token, _ = clip_loss(name)(p, old, A, mask, rollout_log_prob=rollout)
        return average(per_token, mask)

    assert check_trainer(trainer, {"loss": name})


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation='mean' must be one of token-mean"):
        check_trainer(make_ppo_trainer(), {"aggregation": "mean"})


def make_right_call(**changes):
    """Return the arguments of a check that agrees, with some of them changed."""
    log_prob, old, advantages, mask, rollout = make_tokens()
    arguments = {
        "log_prob": log_prob,
        "old_log_prob": old,
        "advantages": advantages,
        "mask": mask,
        "gradient": compute_gradient(make_ppo_trainer(), log_prob, old, advantages, mask, rollout),
        "loss": "dapo",
        "dual_clip": None,
    }
    return arguments | changes


@pytest.mark.parametrize("argument", ["log_prob", "old_log_prob", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_one_token_that_is_not_finite_hides_no_other(argument, value):
    call = make_right_call()
    assert check_gradient(**call)
    call[argument][2, 3] = value
    agreement = check_gradient(**call)
    assert agreement and agreement.not_compared == 1 and "gradient. Not compared: 1 tokens" in str(agreement)
    objection = check_gradient(**call | {"gradient": -call["gradient"]})
    assert not objection and objection.difference == pytest.approx(2) and [2, 3] not in objection.tokens.tolist()
    assert "the trainer's is -1 times as large" in objection.pattern


def test_a_weight_that_is_not_finite_hides_no_other_sequence():
    weights = torch.ones(8, 1, dtype=torch.float64)
    weights[4] = math.nan
    assert check_gradient(**make_right_call(correction=weights)).not_compared == 24
    call = make_right_call(correction=weights)
    assert not check_gradient(**call | {"gradient": 0 * call["gradient"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mask=torch.zeros(8, 24, dtype=torch.bool)), "mask has no token"),
        (
            dict(advantages=torch.full((8, 24), math.nan, dtype=torch.float64)),
            "no token in mask has a finite announced gradient",
        ),
        (dict(correction=math.inf), "no token in mask has a finite announced gradient"),
    ],
    ids=["an empty mask", "advantages", "a weight"],
)
def test_where_nothing_can_be_compared_it_refuses(changes, message):
    call = make_right_call(**changes)
    for gradient in (call["gradient"], -call["gradient"], torch.zeros(8, 24)):
        with pytest.raises(ValueError, match=message):
            check_gradient(**call | {"gradient": gradient})


@pytest.mark.parametrize("changes", [dict(advantages=torch.zeros(8, 24).double()), dict(correction=0.0)], ids=str)
def test_where_every_loss_has_a_gradient_of_0_it_refuses(changes):
    call = make_right_call(**changes)
    with pytest.raises(ValueError, match="every announced gradient is 0"):
        check_gradient(**call | {"gradient": 0 * call["gradient"]})
    assert not check_gradient(**call)


# From a name to the changed arguments of `make_right_call`, and what the message must match.
WRONG_CALLS = {
    **{
        f"{name}=None": ({name: None}, name)
        for name in ("log_prob", "old_log_prob", "advantages", "mask", "gradient", "aggregation", "correction", "loss")
    },
    **{
        f"an integer {name}": ({name: torch.ones(8, 24, dtype=torch.int64)}, name)
        for name in ("log_prob", "old_log_prob", "advantages", "gradient", "aggregation", "correction")
    },
    "a list": (dict(gradient=[[0.0] * 24] * 8), "gradient"),
    "a gradient of one row": (dict(gradient=torch.zeros(1, 24)), "gradient"),
    "a gradient of one number": (dict(gradient=torch.tensor(0.0)), "gradient"),
    "a flat gradient": (dict(gradient=torch.zeros(8 * 24)), "gradient"),
    "a flat log_prob": (dict(log_prob=torch.zeros(24)), "log_prob"),
    "a longer old_log_prob": (dict(old_log_prob=torch.zeros(8, 25)), "old_log_prob"),
    "advantages of sequences": (dict(advantages=torch.zeros(8)), "advantages"),
    "weights for a mask": (dict(mask=torch.full((8, 24), 0.5)), "mask has the value 0.5"),
    "a mask of -1": (dict(mask=torch.full((8, 24), -1)), "mask has the value -1"),
    "a mask that is not a number": (dict(mask=torch.full((8, 24), math.nan)), "mask has the value nan"),
    "a shorter mask": (dict(mask=torch.ones(8, 23)), "mask"),
    "a text as a weight": (dict(correction="2"), "correction is '2': give a number or a tensor"),
    "a boolean as a factor": (dict(aggregation=True), "aggregation is True: give a number or a tensor"),
    "a weight for each place": (dict(correction=torch.ones(24)), "correction"),
    "a weight for each sequence": (dict(correction=torch.ones(8)), r"correction\[:, None\]"),
    "weights of other sequences": (dict(correction=torch.ones(7, 1)), "correction"),
    "a share for each sequence": (dict(aggregation=torch.ones(8)), r"aggregation\[:, None\]"),
    "a decision of a method with bounds of its own": (dict(decision=torch.zeros(3).double()), "decision"),
    "a decision of another size": (dict(loss="acpo", dual_clip=3.0, decision=torch.zeros(1).double()), "decision"),
    "a decision that is a number": (dict(loss="acpo", dual_clip=3.0, decision=0.2), "decision"),
    "a parameter beside a built loss": (dict(loss=clip_loss("dapo")), "dual_clip"),
    "an unknown parameter": (dict(clip_hgih=1.2), "clip_hgih"),
    "float8": (dict(log_prob=torch.zeros(8, 24).to(torch.float8_e5m2)), "log_prob"),
}


@pytest.mark.filterwarnings("ignore:what .* clips follows")
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_refused_by_its_name(name):
    changes, message = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=message):
        check_gradient(**make_right_call(**changes))


def test_one_weight_for_each_sequence_of_a_square_is_not_taken_for_one_of_each_place():
    call = make_right_call()
    square = {name: call[name][:, :8] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
    weights = torch.linspace(0.5, 2, 8).double()

    def weighted_by_sequence(p, old, A, mask):
        return average(surrogate(p, old, A) * weights[:, None], mask)

    gradient = compute_gradient(weighted_by_sequence, *square.values())
    assert check_gradient(**square, gradient=gradient, correction=weights[:, None], dual_clip=None)
    with pytest.raises(ValueError, match=r"correction is \(8,\).*correction\[:, None\]"):
        check_gradient(**square, gradient=gradient, correction=weights, dual_clip=None)
