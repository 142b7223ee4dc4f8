"""Compares the gradient of any trainer's loss with that of an announced one, and names the likeliest difference."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.base.tokens import Inputs
from verl_clipx.elsewhere.clip_loss import ClipLoss, clip_loss
from verl_clipx.loss.apart import RESOLVED, ROUNDING, apart
from verl_clipx.loss.loss import apply
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.modifiers.masks import remaining
from verl_clipx.run.config import Settings
from verl_clipx.worker.aggregation import sequence_weight

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


class GradientCheck(NamedTuple):
    """What `check_gradient` found; true if no token differs.

    Args:
        difference: the largest of a token, relative to its announced gradient; infinite if it is not finite.
        tokens: sequence and place of each token that differs, int64, (tokens, 2).
        reason: the likeliest reason in words; empty if no token differs.
    """

    difference: float
    tokens: Tensor
    reason: str

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self:
            return f"the gradient is the announced one to {self.difference:.1e} of a token's"
        places = ", ".join(f"{sequence}:{place}" for sequence, place in self.tokens[:5].tolist())
        differ = f"{len(self.tokens)} tokens differ, by up to {self.difference:.1e} of a token's gradient"
        return f"{differ} (sequence:token {places}{', …' if len(self.tokens) > 5 else ''}). Likeliest: {self.reason}."


class _Gradient(NamedTuple):
    """The gradient that settings announce for inputs, each token's multiplied by a share."""

    settings: Settings
    inputs: Inputs
    share: Tensor
    decision: Tensor | None

    def of(self, moved: float = 0.0) -> Tensor:
        """With log_prob moved by some nats, (sequences, length)."""
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        return -apply(self.settings.method, self.settings.shaping, inputs, self.decision).weighted * self.share

    def apart(self, gradient: Tensor) -> Tensor:
        """The difference of a gradient from it, as `apart`."""
        at_ratio_1 = (self.inputs.advantages * self.share).where(self.inputs.mask, 0)
        announced = torch.stack([self.of(by) for by in (0.0, ROUNDING, -ROUNDING)])
        return apart(gradient, announced, at_ratio_1, torch.zeros_like(gradient))


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
    rollout_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    group: Tensor | None = None,
    **parameters: Any,
) -> GradientCheck:
    """Whether a trainer's gradient is that of an announced loss, compared as the receipt of a run does.

    Give it ratios beyond every bound and advantages of both signs: at ratio 1 nearly all losses are alike.

    Args:
        log_prob, old_log_prob, advantages, mask, decision, rollout_log_prob, entropy, group: as for `ClipLoss`.
        gradient: of the trainer's scalar loss on log_prob, (sequences, length).
        loss: a name, with its parameters, as for `clip_loss`; or what that returned, as with a modifier `mask`.
        aggregation: token-mean, seq-mean-token-mean, seq-mean-token-sum or token-sum over the tokens in `mask`; or what
            the trainer multiplies each token's loss by, which broadcasts to (sequences, length).
        correction: the announced weights of a rollout correction, which broadcast to (sequences, length).

    Raises:
        ValueError: as `clip_loss` and the loss it returns; or the aggregation is not known.
    """
    loss = clip_loss(loss, **parameters) if isinstance(loss, str) else loss
    log_probs = log_prob.detach().to(torch.promote_types(log_prob.dtype, torch.float32))
    optional = {"rollout_log_prob": rollout_log_prob, "entropy": entropy, "group": group}
    inputs = loss.inputs(log_probs, old_log_prob, advantages, mask, **optional)
    if decision is None:
        decision = apply(loss.settings.method, loss.settings.shaping, inputs).decision
    share, weight = shares(aggregation, mask.bool(), log_probs), torch.as_tensor(correction).to(log_probs)
    announced = _Gradient(loss.settings, inputs, share * weight, decision)
    difference, resolved = announced.apart(gradient.to(log_probs)), RESOLVED[log_prob.dtype]
    wrong, reason = difference > resolved, ""
    if wrong.any():
        variants = [*variants_of(announced, mask.bool(), share, weight, rollout_log_prob)]
        reason = reason_of(announced, variants, gradient.to(log_probs), mask.bool(), resolved)
    return GradientCheck(float(difference.max()), wrong.nonzero(), reason)


def shares(aggregation: str | Tensor | float, mask: Tensor, like: Tensor) -> Tensor:
    """What each token's loss is multiplied by, which broadcasts to (sequences, length)."""
    if isinstance(aggregation, str) and aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}, or a tensor.")
    by_name = isinstance(aggregation, str)
    return torch.as_tensor(sequence_weight(mask, aggregation, like.dtype) if by_name else aggregation).to(like)


def reason_of(
    announced: _Gradient, variants: list[tuple[str, _Gradient]], gradient: Tensor, mask: Tensor, resolved: float
) -> str:
    """The likeliest reason: a variant with that very gradient, else with a multiple of it, else which tokens differ."""
    if not gradient.isfinite().all():
        return "values that are not finite, such as 0 times an infinite ratio: select before exp() and not by a product"
    if gradient[~mask].any():
        return "tokens outside the mask are trained"
    for words, variant in variants:
        if (variant.apart(gradient) <= resolved).all():
            return words
    for words, variant in [("", announced), *variants]:
        own = variant.of()
        largest = own.abs().argmax()
        factor = gradient.flatten()[largest] / own.flatten()[largest]
        if factor and (variant._replace(share=variant.share * factor).apart(gradient) <= resolved).all():
            size = f"all of it {float(factor):.4g} times, as if divided by {mask.sum() / factor.abs():.6g} and not by "
            sign = "the sign: good responses become less likely" if factor < 0 else ""
            other = "" if (factor.abs() - 1).abs() < 1e-3 else f"{size}the {mask.sum()} tokens in the mask"
            return "; ".join(filter(None, (words, sign, other)))
    ratio, own, wrong = (announced.inputs.log_prob - announced.inputs.old_log_prob).exp(), announced.of(), []
    for sign, of_sign in (("> 0", announced.inputs.advantages > 0), ("< 0", announced.inputs.advantages < 0)):
        for has, of in (("none", gradient == 0), ("one where none is announced", own == 0), ("another", own != 0)):
            some = of_sign & of & (announced.apart(gradient) > resolved) & ((gradient != 0) | (has == "none"))
            if some.any():
                low, high = ratio[some].aminmax()
                wrong.append(f"{has} at {some.sum()} tokens with A {sign} and ratios from {low:.4g} to {high:.4g}")
    return f"no variant that is known; the gradient is {'; '.join(wrong)}"


def variants_of(
    announced: _Gradient, mask: Tensor, share: Tensor, weight: Tensor, rollout: Tensor | None
) -> Iterator[tuple[str, _Gradient]]:
    """Gradients that trainers were seen to have instead of the announced one, each with the reason in words."""
    settings, inputs = announced.settings, announced.inputs
    corrections = {"no correction acts": torch.ones_like(weight)}
    if rollout is not None:
        log, number = (inputs.old_log_prob - rollout).where(mask, 0), mask.sum(-1, keepdim=True).clamp(min=1)
        total = log.sum(-1, keepdim=True)
        corrections |= {"each token's ratio corrects": log.exp(), "the product of a sequence's ratios": total.exp()}
        corrections |= {"the geometric mean of a sequence's ratios": (total / number).exp()}
        corrections |= {"the sum of a sequence's ratios": log.exp().where(mask, 0).sum(-1, keepdim=True)}
        yield "ratios are to the policy that sampled", announced._replace(inputs=inputs._replace(old_log_prob=rollout))
    for words, other in corrections.items():
        yield f"the correction: {words}", announced._replace(share=share * other.to(share))
    at_1 = inputs._replace(old_log_prob=inputs.log_prob)
    yield "every ratio is 1, as if the old policy were the current one", announced._replace(inputs=at_1)
    for name in AGGREGATIONS:
        averaged = shares(name, mask, share) * weight
        yield f"the aggregation: tokens are averaged by {name}", announced._replace(share=averaged)
    if settings.mask is not None:
        whole = inputs._replace(mask=mask)
        single = whole._replace(**{key: of.reshape(-1, 1) for key, of in whole._asdict().items() if of is not None})
        judged = whole._replace(mask=remaining(settings.mask, single).view(mask.shape))
        yield f"{settings.mask.rule} takes nothing out", announced._replace(inputs=whole)
        yield f"{settings.mask.rule} judges tokens and not sequences", announced._replace(inputs=judged)
    own, losses = settings.method, []
    for changes in changes_of(own):
        words = ", ".join(f"{key}={value} acts and not {getattr(own, key)}" for key, value in changes.items())
        losses.append(
            (f"a parameter is not forwarded: {words}", functools.partial(dataclasses.replace, own, **changes))
        )
    for name in BUILT_IN:
        fields = [field.name for field in dataclasses.fields(METHODS[name])]
        for same in ({key: value for key, value in own.parameters.items() if key in fields}, {}):
            losses.append((f"it is the gradient of {name}", functools.partial(METHODS[name], **same)))
    for words, build in losses:
        with contextlib.suppress(ValueError):
            other = dataclasses.replace(settings, method=build())
            if other.asks_for == settings.asks_for and (isinstance(other.method, type(own)) or not other.adaptive):
                yield words, announced._replace(settings=other)


def changes_of(method: Method) -> Iterator[dict[str, Any]]:
    """Other values of a method's parameters: defaults, none, every choice, and bounds that mirror each other."""
    for field in dataclasses.fields(method):
        allowed, own = field.metadata["allowed"], getattr(method, field.name)
        values = [field.default, *allowed.choices, *([None] if allowed.null else [])]
        yield from ({field.name: value} for value in dict.fromkeys(values) if value != own)
    low, high = (getattr(method, key, None) for key in ("clip_low", "clip_high"))
    if low is not None and high is not None:
        yield {"clip_high": round(2 - low, 12)}
        yield {"clip_low": round(2 - high, 12)}
        yield {"clip_low": None, "clip_high": None}
