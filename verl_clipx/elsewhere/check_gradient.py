"""Compares the gradient of any trainer's loss with that of an announced one, and names the likeliest difference."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        by, places = f"{self.difference:.1e} of a token's", ", ".join(f"{s}:{t}" for s, t in self.tokens[:5].tolist())
        differ = f"{len(self.tokens)} tokens differ by up to {by} gradient, first (sequence:token) {places}"
        return f"the gradient is the announced one to {by}" if self else f"{differ}. Likeliest: {self.reason}."


class _Gradient(NamedTuple):
    """The gradient that settings announce for inputs, each token's multiplied by a share."""

    settings: Settings
    inputs: Inputs
    share: Tensor
    decision: Tensor | None

    def of(self, moved: float = 0.0) -> Tensor:
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        return -apply(self.settings.method, self.settings.shaping, inputs, self.decision).weighted * self.share

    def apart(self, gradient: Tensor) -> Tensor:
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
    **further: Any,
) -> GradientCheck:
    """Whether a trainer's gradient is that of an announced loss, compared as the receipt of a run does.

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
    announced = _Gradient(settings, inputs, share * weight, decision)
    difference = announced.apart(gradient)
    wrong, reason = difference > resolved, ""
    if wrong.any():
        variants = [("", announced), *variants_of(announced, mask, share, weight, optional["rollout_log_prob"])]
        reason = reason_of(variants, gradient, mask, resolved) or pattern_of(announced, gradient, wrong)
    return GradientCheck(float(difference.max()) + 0.0, wrong.nonzero(), reason)


def reason_of(variants: list[tuple[str, _Gradient]], gradient: Tensor, mask: Tensor, resolved: float) -> str:
    """The words of the variant with that very gradient, else of one with a multiple of it; empty if there is none."""
    if not gradient.isfinite().all():
        return "values that are not finite, such as 0 times an infinite ratio: select before exp() and not by a product"
    if gradient[~mask].any():
        return "tokens outside the mask are trained"
    if not gradient.any():
        return "no gradient reaches log_prob"
    # One that is nowhere, or not finite, would fit everything.
    variants = [(words, variant) for words, variant in variants if 0 < variant.of().abs().sum() < torch.inf]
    for words, variant in variants:
        if (variant.apart(gradient) <= resolved).all():
            return words
    for words, variant in variants:
        own = variant.of()
        factor = gradient.flatten()[own.abs().argmax()] / own.flatten()[own.abs().argmax()]
        if factor and (variant._replace(share=variant.share * factor).apart(gradient) <= resolved).all():
            size, tokens = f"all of it {float(factor):.4g} times, as if divided by", mask.sum()
            other = f"{size} {tokens / factor.abs():.6g} and not by the {tokens} tokens in the mask"
            sign = "the sign is wrong" if factor < 0 else ""
            return "; ".join(filter(None, (words, sign, "" if (factor.abs() - 1).abs() < 1e-3 else other)))
    return ""


def pattern_of(announced: _Gradient, gradient: Tensor, wrong: Tensor) -> str:
    """Which tokens differ, by their advantages' sign and their ratios."""
    inputs, own, parts = announced.inputs, announced.of(), []
    ratio = (inputs.log_prob - inputs.old_log_prob).exp()
    for sign, positive in (("A > 0", inputs.advantages > 0), ("A < 0", inputs.advantages < 0)):
        for has, of in (("no", gradient == 0), ("an unannounced", own == 0), ("another", (gradient != 0) & (own != 0))):
            if (some := of & positive & wrong).any():
                ends = "to".join(f" {float(end):.4g} " for end in ratio[some].aminmax())
                parts.append(f"{has} gradient at {some.sum()} tokens with {sign} and ratios from{ends.rstrip()}")
    return f"no known one; {'; '.join(parts)}"


def variants_of(
    announced: _Gradient, mask: Tensor, share: Tensor, weight: Tensor, rollout: Tensor | None
) -> Iterator[tuple[str, _Gradient]]:
    """Gradients that trainers were seen to have instead of the announced one, each with the reason in words."""
    settings, inputs = announced.settings, announced.inputs
    method, rollout = settings.method, inputs.old_log_prob if rollout is None else rollout
    log = (inputs.old_log_prob - rollout).where(mask, 0).to(share)
    corrections = {"missing": log * 0 + 1, "each token's ratio": log.exp()}
    corrections |= {"the product of a sequence's ratios": log.sum(-1, keepdim=True).exp()}
    corrections |= {"the sum of a sequence's ratios": log.exp().where(mask, 0).sum(-1, keepdim=True)}
    at_1, to_sampler = (inputs._replace(old_log_prob=of) for of in (inputs.log_prob, rollout))
    changes: dict[str, dict[str, Any]] = {"the old policy is the current one, and every ratio 1": {"inputs": at_1}}
    changes |= {"the old policy is the sampler's": {"inputs": to_sampler}}
    averaged = {name: weight * sequence_weight(mask, name, weight.dtype) for name in AGGREGATIONS}
    changes |= {f"tokens are averaged by {name}": {"share": of} for name, of in averaged.items()}
    changes |= {f"the correction is {which}": {"share": share * of} for which, of in corrections.items()}
    if settings.mask is not None:
        whole, rule = inputs._replace(mask=mask), settings.mask.rule
        single = whole._replace(**{key: of.reshape(-1, 1) for key, of in whole._asdict().items() if of is not None})
        judged = whole._replace(mask=remaining(settings.mask, single).view(mask.shape))
        changes |= {f"{rule} takes nothing out": {"inputs": whole}}
        changes |= {f"{rule} judges tokens and not sequences": {"inputs": judged}}
    yield from ((words, announced._replace(**change)) for words, change in changes.items())
    bounds = {key: of for key in ("clip_low", "clip_high") if (of := getattr(method, key, None)) is not None}
    others = [{key: round(2 - of, 12)} for key, of in zip(reversed(bounds), bounds.values(), strict=True)]
    for field in dataclasses.fields(method):
        allowed = field.metadata["allowed"]
        others += [{field.name: of} for of in (field.default, *allowed.choices, *[None] * allowed.null)]
    losses = [(method, other) for other in (*others, dict.fromkeys(bounds))]
    losses += [(METHODS[name](), same) for name in BUILT_IN for same in (bounds, {})]
    for kind, other in losses:
        with contextlib.suppress(ValueError, TypeError):
            made = dataclasses.replace(settings, method=dataclasses.replace(kind, **other))
            acts = ", ".join(f"{key}={of} acts and not {getattr(method, key)}" for key, of in other.items())
            if made.asks_for == settings.asks_for and (kind is method or not made.adaptive):
                words = f"not forwarded: {acts}" if kind is method else f"the gradient is that of {kind.name}"
                yield words, announced._replace(settings=made)
