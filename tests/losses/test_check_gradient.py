"""Published faults of other trainers' losses, each by its own formula and autograd, and what `check_gradient` says of
them. Not covered: the faults that docs/elsewhere.md calls out of reach; the comparison in a run
(tests/training/worker/test_receipt.py).
"""

import inspect
import math

import pytest
import torch
from torch import where

from verl_clipx import check_gradient, clip_loss


def tokens(dtype=torch.float64):
    """Log-probabilities of the current and the old policy, advantages of both signs, a ragged mask, the sampler's."""
    torch.manual_seed(1)
    old = -torch.rand(8, 24, dtype=torch.float64) * 2 - 0.1
    current = old + 0.5 * torch.randn(8, 24, dtype=torch.float64)
    rollout = old + 0.05 * torch.randn(8, 24, dtype=torch.float64)
    advantages = torch.tensor([1.5, -1.0, 0.5, -0.7, 2.0, -1.2, 0.9, -0.4], dtype=torch.float64)[:, None]
    mask = torch.arange(24) < torch.tensor([24, 20, 7, 15, 24, 11, 3, 18])[:, None]
    return [of.to(dtype) for of in (current, old, advantages.repeat(1, 24))] + [mask, rollout.to(dtype)]


def surrogate(p, old, A, low=0.8, high=1.28, dual_clip=None):
    """PPO's clipped loss of each token."""
    ratio = (p - old).exp()
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(low, high))
    return loss if dual_clip is None else where(A < 0, torch.minimum(loss, -A * dual_clip), loss)


def mean(loss, mask, number=None):
    return where(mask, loss, 0).sum() / (mask.sum() if number is None else number)


def ppo(number=None, factor=1.0, **clip):
    """A trainer: a function of the tensors of `tokens` that returns a scalar, dapo without dual clip by default."""
    return lambda p, old, A, mask, rollout: factor * mean(surrogate(p, old, A, **clip), mask, number)


def sum_of_ratios(p, old, A, mask, rollout):
    return mean(surrogate(p, old, A) * where(mask, (old - rollout).exp(), 0).sum(-1, keepdim=True), mask)


def opsm_by_token(p, old, A, mask, rollout):
    return mean(surrogate(p, old, A) * ~((A < 0) & (rollout - p.detach() > 0.05)), mask)


def overflowing(p, old, A, mask, rollout):
    hopeless = torch.arange(24) == 2
    return mean(where(hopeless, 0, -A) * (p - where(hopeless, -1e4, old)).exp() * ~hopeless, mask)


def checked(trainer, announced, dtype=torch.float64, left=None):
    log_prob, old, advantages, mask, rollout = tokens(dtype)
    mask = mask if left is None else left
    announced = dict(announced)
    if "advantages" in announced:
        advantages[0, 0] = announced.pop("advantages")
    leaf = log_prob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(trainer(leaf, old, advantages, mask, rollout), leaf)
    further = {key: of(old, rollout, mask) if inspect.isfunction(of) else of for key, of in announced.items()}
    return check_gradient(log_prob, old, advantages, mask, gradient, rollout_log_prob=rollout, **further)


def product(old, rollout, mask):
    return where(mask, old - rollout, 0).sum(-1, keepdim=True).exp()


DAPO = {"loss": "dapo", "dual_clip": None}
OPSM = {"loss": clip_loss("dapo", dual_clip=None, mask={"rule": "opsm", "delta": 0.05})}
HUNDREDTH = {**DAPO, "correction": lambda old, rollout, mask: torch.full_like(old, 0.01)}
BY_TOKEN = {"loss": "dapo", "correction": lambda old, rollout, mask: (old - rollout).exp()}

# What the trainer computes where dapo without a dual clip was announced; words of the pattern, where it is easily told.
OF_DAPO = {
    "trl#6369": (ppo(number=244), "where the announced gradient is not 0, the trainer's is 0.5 times as large"),
    "SkyRL#1315, miles#1829": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, rollout, A), mask),
        "another gradient at",
    ),
    # No thread reports these.
    "a symmetric clip": (ppo(high=1.2), "no gradient at 4 tokens with A > 0 and ratios from 1.2"),
    "no clip": (ppo(low=0, high=1e9), "an unannounced gradient at"),
    "a mean of means": (
        lambda p, old, A, mask, rollout: (where(mask, surrogate(p, old, A), 0).sum(-1) / mask.sum(-1)).mean(),
        "another gradient at",
    ),
    "the objective": (ppo(factor=-1), "the trainer's is -1 times as large"),
    "no gradient": (ppo(factor=0), "no gradient at"),
    "a wider bound": (ppo(high=1.5), "an unannounced gradient at 4 tokens with A > 0 and ratios from 1.2"),
    "a narrower bound": (ppo(low=0.9), "no gradient at 3 tokens with A < 0 and ratios from 0.8"),
    "padding": (
        lambda p, old, A, mask, rollout: surrogate(p, old, A).sum() / mask.sum(),
        "tokens outside the mask and ratios from",
    ),
}
# The same where something else was announced.
FAULTS = {name: (trainer, DAPO, pattern) for name, (trainer, pattern) in OF_DAPO.items()} | {
    "unsloth-zoo#870": (sum_of_ratios, {**DAPO, "correction": product}, "another gradient at"),
    "unsloth-zoo#870, VESPO": (
        *(lambda p, old, A, mask, rollout: mean(-A * p, mask), {"loss": "vespo"}),
        "another gradient at",
    ),
    "Liger-Kernel#1082": (ppo(), HUNDREDTH, "the trainer's is 100 times as large"),
    "slime#2247": (ppo(), {"loss": "dapo", "dual_clip": 1.5}, "unannounced gradient at 21 tokens with A < 0 and rat"),
    "slime#1917": (opsm_by_token, OPSM, "with A < 0 and ratios from"),
    "verl#4912, #4272": (ppo(dual_clip=3.0), BY_TOKEN, "another gradient at"),
    "prime-rl#2973, Soup#342": (overflowing, {**DAPO, "clip_low": None, "clip_high": None}, "that is not finite at"),
    "a token without advantage": (
        *(
            lambda p, old, A, mask, rollout: mean(surrogate(p, old, A) - (A == 0) * p, mask),
            {**DAPO, "advantages": 0.0},
        ),
        "an unannounced gradient at 1 tokens with A = 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_tokens_are_named(fault):
    trainer, announced, pattern = FAULTS[fault]
    found = checked(trainer, announced)
    assert not found and len(found.tokens) > 0 and pattern in str(found), str(found)
    assert math.isinf(found.difference) == ("not finite" in pattern)
    sequence, place = found.tokens[0].tolist()
    assert f"first (sequence:token) {sequence}:{place}" in str(found)


def test_rejected_tokens_that_stay_in_the_denominator_are_found():
    # verl#4852: rejection in bypass mode changes the numerator's mask alone.
    whole = tokens()[3]
    found = checked(ppo(number=whole.sum()), DAPO, left=whole & (torch.arange(24) % 3 > 0))
    assert "where the announced gradient is not 0, the trainer's is 0.6557 times as large" in found.pattern


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_announced_loss_agrees_in_every_dtype(dtype):
    def trainer(*given):
        wide = [of.to(torch.promote_types(dtype, torch.float32)) for of in given[:3]]
        return ppo(dual_clip=3.0)(*wide, *given[3:])

    for aggregation in ("token-mean", lambda old, rollout, mask: 1 / mask.sum()):
        found = checked(trainer, {"loss": "dapo", "aggregation": aggregation}, dtype)
        assert found and len(found.tokens) == 0 and "is the announced one" in str(found), str(found)


@pytest.mark.filterwarnings("ignore:what .* clips follows")
@pytest.mark.parametrize("name", ["acpo", "m2po", "kl_cov", "gspo", "dro"])
def test_our_own_losses_agree_with_what_they_announce(name):
    def trainer(p, old, A, mask, rollout):
        return mean(clip_loss(name)(p, old, A, mask, rollout_log_prob=rollout)[0], mask)

    assert checked(trainer, {"loss": name})


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation='mean' must be one of token-mean"):
        checked(ppo(), {"aggregation": "mean"})


def right_call(**changes):
    """The arguments of a check that agrees, with some of them changed."""
    log_prob, old, advantages, mask, _ = tokens()
    leaf = log_prob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ppo()(leaf, old, advantages, mask, None), leaf)
    call = dict(log_prob=log_prob, old_log_prob=old, advantages=advantages, mask=mask, gradient=gradient)
    return call | {"loss": "dapo", "dual_clip": None} | changes


@pytest.mark.parametrize("argument", ["log_prob", "old_log_prob", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_one_token_that_is_not_finite_hides_no_other(argument, value):
    call = right_call()
    assert check_gradient(**call)
    call[argument][2, 3] = value
    right = check_gradient(**call)
    assert right and right.not_compared == 1 and "gradient. Not compared: 1 tokens" in str(right)
    wrong = check_gradient(**call | {"gradient": -call["gradient"]})
    assert not wrong and wrong.difference == pytest.approx(2) and [2, 3] not in wrong.tokens.tolist()
    assert "the trainer's is -1 times as large" in wrong.pattern


def test_a_weight_that_is_not_finite_hides_no_other_sequence():
    weights = torch.ones(8, 1, dtype=torch.float64)
    weights[4] = math.nan
    assert check_gradient(**right_call(correction=weights)).not_compared == 24
    call = right_call(correction=weights)
    assert not check_gradient(**call | {"gradient": 0 * call["gradient"]})


@pytest.mark.parametrize(
    ("changes", "named"),
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
def test_where_nothing_can_be_compared_it_refuses(changes, named):
    call = right_call(**changes)
    for gradient in (call["gradient"], -call["gradient"], torch.zeros(8, 24)):
        with pytest.raises(ValueError, match=named):
            check_gradient(**call | {"gradient": gradient})


@pytest.mark.parametrize("changes", [dict(advantages=torch.zeros(8, 24).double()), dict(correction=0.0)], ids=str)
def test_where_every_loss_has_a_gradient_of_0_it_refuses(changes):
    call = right_call(**changes)
    with pytest.raises(ValueError, match="every announced gradient is 0"):
        check_gradient(**call | {"gradient": 0 * call["gradient"]})
    assert not check_gradient(**call)


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
    changes, named = WRONG_CALLS[name]
    with pytest.raises(ValueError, match=named):
        check_gradient(**right_call(**changes))


def test_one_weight_for_each_sequence_of_a_square_is_not_taken_for_one_of_each_place():
    square = {name: right_call()[name][:, :8] for name in ("log_prob", "old_log_prob", "advantages", "mask")}
    leaf, weights = square["log_prob"].clone().requires_grad_(), torch.linspace(0.5, 2, 8).double()
    loss = mean(surrogate(leaf, square["old_log_prob"], square["advantages"]) * weights[:, None], square["mask"])
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert check_gradient(**square, gradient=gradient, correction=weights[:, None], dual_clip=None)
    with pytest.raises(ValueError, match=r"correction is \(8,\).*correction\[:, None\]"):
        check_gradient(**square, gradient=gradient, correction=weights, dual_clip=None)
