"""Compares the gradient of any trainer's loss with that of an announced one, and names the likeliest difference."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.base.tokens import Inputs
from verl_clipx.elsewhere.clip_loss import NEEDED, ClipLoss, clip_loss
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
        places = ", ".join(f"{sequence}:{place}" for sequence, place in self.tokens[:5].tolist())
        differ = (
            f"{len(self.tokens)} tokens differ, by up to {self.difference:.1e} of a token's gradient, first {places}"
        )
        same = f"the gradient is the announced one to {self.difference:.1e} of a token's"
        return same if self else f"{differ} (sequence:token). Likeliest: {self.reason}."


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
        announced = torch.stack([self.of(by) for by in (0.0, ROUNDING, -ROUNDING)])
        at_ratio_1 = (self.inputs.advantages * self.share).where(self.inputs.mask, 0)
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
    **further: Any,
) -> GradientCheck:
    """Whether a trainer's gradient is that of an announced loss, compared as the receipt of a run does.

    Give it ratios beyond every bound and advantages of both signs: at ratio 1 nearly all losses are alike.

    Args:
        log_prob, old_log_prob, advantages, mask, decision: as for `ClipLoss`.
        gradient: of the trainer's scalar loss on log_prob, (sequences, length).
        loss: a name as for `clip_loss`, or what that returned, as with a modifier `mask`.
        aggregation: token-mean, seq-mean-token-mean, seq-mean-token-sum or token-sum over the tokens in `mask`; or what
            the trainer multiplies each token's loss by, which broadcasts to (sequences, length).
        correction: the announced weights of a rollout correction, which broadcast to (sequences, length).
        **further: rollout_log_prob, entropy and group as for `ClipLoss`, and parameters of the loss.

    Raises:
        ValueError: as `clip_loss` and the loss it returns; or the aggregation is not known.
    """
    optional = {name: further.pop(name, None) for name in NEEDED}
    settings = (clip_loss(loss, **further) if isinstance(loss, str) else loss).settings
    log_prob, resolved = (
        log_prob.detach().to(torch.promote_types(log_prob.dtype, torch.float32)),
        RESOLVED[log_prob.dtype],
    )
    inputs, mask = ClipLoss(settings).inputs(log_prob, old_log_prob, advantages, mask, **optional), mask.bool()
    if decision is None:
        decision = apply(settings.method, settings.shaping, inputs).decision
    share = sequence_weight(mask, aggregation, log_prob.dtype) if isinstance(aggregation, str) else aggregation
    if share is None:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}, or a tensor.")
    share, weight, gradient = (torch.as_tensor(of).to(log_prob) for of in (share, correction, gradient))
    announced = _Gradient(settings, inputs, share * weight, decision)
    difference = announced.apart(gradient)
    wrong, reason = difference > resolved, ""
    if wrong.any():
        variants = [*variants_of(announced, mask, share, weight, optional["rollout_log_prob"])]
        reason = reason_of(announced, variants, gradient, mask, resolved)
    return GradientCheck(float(difference.max()), wrong.nonzero(), reason)


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
            size = f"all of it {float(factor):.4g} times, as if divided by {mask.sum() / factor.abs():.6g}"
            other = "" if (factor.abs() - 1).abs() < 1e-3 else f"{size} and not by the {mask.sum()} tokens in the mask"
            return "; ".join(filter(None, (words, "the sign is wrong" if factor < 0 else "", other)))
    A, own, parts = announced.inputs.advantages, announced.of(), []
    ratio, wrong = (
        (announced.inputs.log_prob - announced.inputs.old_log_prob).exp(),
        announced.apart(gradient) > resolved,
    )
    for sign, positive in (("A > 0", A > 0), ("A < 0", A < 0)):
        for has, some in (
            ("no", gradient == 0),
            ("an unannounced", own == 0),
            ("another", (gradient != 0) & (own != 0)),
        ):
            if (some := some & positive & wrong).any():
                low, high = ratio[some].aminmax()
                parts.append(
                    f"{has} gradient at {some.sum()} tokens with {sign} and ratios from {low:.4g} to {high:.4g}"
                )
    return f"no known one; {'; '.join(parts)}"


def variants_of(
    announced: _Gradient, mask: Tensor, share: Tensor, weight: Tensor, rollout: Tensor | None
) -> Iterator[tuple[str, _Gradient]]:
    """Gradients that trainers were seen to have instead of the announced one, each with the reason in words."""
    settings, inputs, corrections = (
        announced.settings,
        announced.inputs,
        {"no correction acts": torch.ones_like(weight)},
    )
    if rollout is not None:
        log, number = (inputs.old_log_prob - rollout).where(mask, 0).to(share), mask.sum(-1, keepdim=True).clamp(min=1)
        total = log.sum(-1, keepdim=True)
        corrections |= {"each token's ratio corrects": log.exp(), "the product of a sequence's ratios": total.exp()}
        corrections |= {"the geometric mean of a sequence's ratios": (total / number).exp()}
        corrections |= {"the sum of a sequence's ratios": log.exp().where(mask, 0).sum(-1, keepdim=True)}
        yield "ratios are to the policy that sampled", announced._replace(inputs=inputs._replace(old_log_prob=rollout))
    at_1 = inputs._replace(old_log_prob=inputs.log_prob)
    yield "every ratio is 1, as if the old policy were the current one", announced._replace(inputs=at_1)
    for words, other in corrections.items():
        yield f"the correction: {words}", announced._replace(share=share * other)
    for name in AGGREGATIONS:
        averaged = weight * sequence_weight(mask, name, weight.dtype)
        yield f"the aggregation: tokens are averaged by {name}", announced._replace(share=averaged)
    if settings.mask is not None:
        whole, rule = inputs._replace(mask=mask), settings.mask.rule
        single = whole._replace(**{key: of.reshape(-1, 1) for key, of in whole._asdict().items() if of is not None})
        judged = whole._replace(mask=remaining(settings.mask, single).view(mask.shape))
        yield f"{rule} takes nothing out", announced._replace(inputs=whole)
        yield f"{rule} judges tokens and not sequences", announced._replace(inputs=judged)
    for words, kind, parameters in losses_like(settings.method):
        with contextlib.suppress(ValueError):
            other = dataclasses.replace(settings, method=dataclasses.replace(kind, **parameters))
            if other.asks_for == settings.asks_for and (kind is settings.method or not other.adaptive):
                yield words, announced._replace(settings=other)


def losses_like(method: Method) -> Iterator[tuple[str, Method, dict[str, Any]]]:
    """The method with defaults, none, other choices and mirrored bounds; others, also with its parameters."""
    bounds = {key: value for key in ("clip_low", "clip_high") if (value := getattr(method, key, None)) is not None}
    changes = [{key: round(2 - value, 12)} for key, value in zip(reversed(bounds), bounds.values(), strict=True)]
    for field in dataclasses.fields(method):
        allowed = field.metadata["allowed"]
        changes += [{field.name: value} for value in (field.default, *allowed.choices, *[None] * allowed.null)]
    for change in (*changes, dict.fromkeys(bounds)):
        words = ", ".join(f"{key}={value} acts and not {getattr(method, key)}" for key, value in change.items())
        yield f"a parameter is not forwarded: {words}", method, change
    for name in BUILT_IN:
        fields = {field.name for field in dataclasses.fields(METHODS[name])}
        for parameters in ({key: value for key, value in method.parameters.items() if key in fields}, {}):
            yield f"it is the gradient of {name}", METHODS[name](), parameters
