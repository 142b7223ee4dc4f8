"""Compares the gradient of any trainer's loss with that of an announced one, and names the tokens that differ."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.applying.aggregation import sequence_weight
from verl_clipx.losses.applying.apart import RESOLVED, ROUNDING, apart
from verl_clipx.losses.applying.loss import apply
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.clip_loss import NEEDED, ClipLoss, clip_loss

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


class GradientCheck(NamedTuple):
    """The result of `check_gradient`; true if no token differs.

    Args:
        difference: the largest of a token, relative to its announced gradient; infinite if it is not finite.
        tokens: sequence and place of each token that differs, int64, (tokens, 2).
        pattern: which tokens differ, in words; empty if none does.
    """

    difference: float
    tokens: Tensor
    pattern: str

    def __bool__(self) -> bool:
        return not self.pattern

    def __str__(self) -> str:
        by, places = f"{self.difference:.1e} of a token's", ", ".join(f"{s}:{t}" for s, t in self.tokens[:5].tolist())
        differ = f"{len(self.tokens)} tokens differ by up to {by} gradient, first (sequence:token) {places}"
        return f"the gradient is the announced one to {by}" if self else f"{differ}: {self.pattern}."


def check_gradient(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    gradient: Tensor,
    loss: str | ClipLoss = "dapo",
    *,
    aggregation: str | Tensor | float = "token-mean",
    correction: Tensor | float = 1.0,
    decision: Tensor | None = None,
    **further: Any,
) -> GradientCheck:
    """Compares a trainer's gradient with that of an announced loss, as the receipt of a run does.

    Give it ratios beyond every bound and advantages of both signs: at ratio 1 nearly all losses are alike.

    Args:
        log_prob, old_log_prob, advantages, mask, decision: as for `ClipLoss`.
        gradient: of the trainer's scalar loss on log_prob, (sequences, length).
        loss: a name as for `clip_loss`, or what that returned, as with a modifier `mask`.
        aggregation: one of AGGREGATIONS over the tokens in `mask`, or what the trainer multiplies each token's loss by.
        correction: announced weights of a rollout correction; both broadcast to (sequences, length).
        **further: rollout_log_prob, entropy and group as for `ClipLoss`, and parameters of the loss.

    Raises:
        ValueError: as `clip_loss` and the loss it returns; or the aggregation is not known.
    """
    optional, resolved = {name: further.pop(name, None) for name in NEEDED}, RESOLVED[log_prob.dtype]
    settings = (clip_loss(loss, **further) if isinstance(loss, str) else loss).settings
    log_prob = log_prob.detach().to(torch.promote_types(log_prob.dtype, torch.float32))
    inputs, mask = ClipLoss(settings).inputs(log_prob, old_log_prob, advantages, mask, **optional), mask.bool()
    share = sequence_weight(mask, aggregation, log_prob.dtype) if isinstance(aggregation, str) else aggregation
    if share is None:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}, or a tensor.")
    share, weight, gradient = (torch.as_tensor(of).to(log_prob) for of in (share, correction, gradient))
    share = share * weight

    def announced(moved: float = 0.0) -> Tensor:
        at = inputs._replace(log_prob=inputs.log_prob + moved)
        return -apply(settings.method, settings.shaping, at, decision).weighted * share

    at_ratio_1 = (inputs.advantages * share).where(inputs.mask, 0)
    sides = torch.stack([announced(by) for by in (0.0, ROUNDING, -ROUNDING)])
    difference = apart(gradient, sides, at_ratio_1, torch.zeros_like(gradient))
    wrong = difference > resolved
    pattern = "; ".join(patterns_of(inputs, mask, announced(), gradient, wrong))
    return GradientCheck(float(difference.max()) + 0.0, wrong.nonzero(), pattern)


def patterns_of(inputs: Inputs, mask: Tensor, announced: Tensor, gradient: Tensor, wrong: Tensor) -> Iterator[str]:
    """Says of each kind of wrong token how its gradient differs, and at which ratios."""
    ratio = (inputs.log_prob - inputs.old_log_prob).exp()
    multiple = (gradient / announced)[wrong & (announced != 0)]
    if len(multiple) and (multiple / multiple[0] - 1).abs().max() < 1e-3:
        yield f"wherever one is announced it is {float(multiple[0]):.4g} times as large"
    none, not_finite = gradient == 0, ~gradient.isfinite()
    kinds = {"one that is not finite": not_finite, "no gradient": none, "an unannounced gradient": announced == 0}
    kinds["another gradient"] = ~(none | not_finite | (announced == 0))
    sign = inputs.advantages.sign().where(mask, 2)
    places = {"with A > 0": sign == 1, "with A < 0": sign == -1, "with A = 0": sign == 0, "outside the mask": sign == 2}
    for words, of in kinds.items():
        for where, there in places.items():
            if (some := of & there & wrong).any():
                ends = " to ".join(f"{float(end):.4g}" for end in ratio[some].aminmax())
                yield f"{words} at {some.sum()} tokens {where} and ratios from {ends}"
