"""Compares the gradient of any trainer's loss with that of an announced one, and names the tokens that differ."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.losses.applying.aggregation import sequence_weight
from verl_clipx.losses.applying.apart import RESOLVED, ROUNDING, apart, largest_known
from verl_clipx.losses.applying.loss import apply, token_statistics
from verl_clipx.losses.base.parameters import reject_unknown
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.clip_loss import NEEDED, ClipLoss, clip_loss

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


class GradientCheck(NamedTuple):
    """The result of `check_gradient`; true if no token differs.

    Args:
        difference: the largest of a token, relative to its announced gradient; infinite if it is not finite.
        tokens: sequence and place of each token that differs, int64, (tokens, 2).
        pattern: which tokens differ, in words; empty if none does.
        not_compared: how many tokens of the mask have an announced gradient that is not finite.
    """

    difference: float
    tokens: Tensor
    pattern: str
    not_compared: int = 0

    def __bool__(self) -> bool:
        return not self.pattern

    def __str__(self) -> str:
        size = f"{self.difference:.1e} of a token's"
        if self:
            verdict = f"the gradient is the announced one to {size}"
        else:
            places = ", ".join(f"{sequence}:{place}" for sequence, place in self.tokens[:5].tolist())
            differ = f"{len(self.tokens)} tokens differ by up to {size} gradient, first (sequence:token) {places}"
            verdict = f"{differ}: {self.pattern}."
        if not self.not_compared:
            return verdict
        return f"{verdict} Not compared: {self.not_compared} tokens whose announced gradient is not finite"


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
    """Compare a trainer's gradient with that of an announced loss, as the receipt of a run does.

    Give it ratios beyond every bound and advantages of both signs: at ratio 1 nearly all losses are alike. A token
    whose announced gradient is not finite, such as one with a NaN in its inputs, is not compared.

    Args:
        log_prob, old_log_prob, advantages, mask, decision: as for `ClipLoss`.
        gradient: of the trainer's scalar loss on log_prob, (sequences, length).
        loss: a name as for `clip_loss`, or what that returned, as with a modifier `mask`.
        aggregation: one of AGGREGATIONS over the tokens in `mask`, or what the trainer multiplies each token's loss by:
            a number or a tensor, as `correction`.
        correction: announced weights of a rollout correction: a number, (sequences, length), (sequences, 1) for one
            weight a sequence, or (1, length).
        **further: rollout_log_prob, entropy and group as for `ClipLoss`, and parameters of the loss.

    Raises:
        ValueError: an argument is of another kind, shape or size, or is not known; no token can be compared.
    """
    tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages, "gradient": gradient}
    for name, tensor in tensors.items():
        require_numbers(name, tensor)
    require_mask(mask)
    if log_prob.dtype not in RESOLVED:
        raise ValueError(f"log_prob is {log_prob.dtype}: give {', '.join(map(str, RESOLVED))}.")
    resolved = RESOLVED[log_prob.dtype]
    optional = {name: further.pop(name, None) for name in NEEDED}
    require_optional(optional)
    announced_loss = loss_of(loss, further)
    settings = announced_loss.settings
    log_prob = log_prob.detach().to(torch.promote_types(log_prob.dtype, torch.float32))
    inputs = announced_loss.inputs(log_prob, old_log_prob, advantages, mask, **optional)
    shape = tuple(log_prob.shape)
    if tuple(gradient.shape) != shape:
        raise ValueError(f"gradient is {tuple(gradient.shape)}, but log_prob is {shape}: give {shape}.")
    if decision is not None:
        require_decision(settings, inputs, decision)
    mask = mask.bool()
    share = aggregation_share(aggregation, mask, log_prob) * factor("correction", correction, log_prob)
    gradient = gradient.detach().to(log_prob)

    def announced(moved: float = 0.0) -> Tensor:
        moved_inputs = inputs._replace(log_prob=inputs.log_prob + moved)
        weighted = apply(settings.method, settings.shaping, moved_inputs, decision).weighted
        # A mean over no token has an infinite share, and no gradient of the tokens outside the mask.
        return torch.where(inputs.mask, -weighted * share, 0.0)

    at_ratio_1 = (inputs.advantages * share).where(inputs.mask, 0)
    sides = torch.stack([announced(moved) for moved in (0.0, ROUNDING, -ROUNDING)])
    difference = apart(gradient, sides, at_ratio_1, torch.zeros_like(gradient))
    compared = mask & ~difference.isnan()
    if not compared.any():
        raise ValueError(nothing_to_compare(mask))
    if not (at_ratio_1[compared].any() or gradient[compared].any()):
        raise ValueError(
            "every announced gradient is 0, whatever the loss, so nothing can be compared: give advantages, an "
            "aggregation and a correction that are not 0 everywhere."
        )
    wrong = difference > resolved
    return GradientCheck(
        # Adding 0 turns -0.0 into 0.0.
        difference=largest_known(difference) + 0.0,
        tokens=wrong.nonzero(),
        pattern="; ".join(patterns_of(inputs, mask, announced(), gradient, wrong)),
        not_compared=int((mask & ~compared).sum()),
    )


def loss_of(loss: str | ClipLoss, parameters: dict[str, Any]) -> ClipLoss:
    """Return the loss that is announced; raises ValueError if it is neither a name nor what `clip_loss` returned."""
    if isinstance(loss, str):
        return clip_loss(loss, **parameters)
    if not isinstance(loss, ClipLoss):
        raise ValueError(f"loss is {loss!r}: give a name, such as 'dapo', or what clip_loss returned.")
    if parameters:
        # What `clip_loss` returned has its parameters already.
        reject_unknown(parameters, NEEDED, "check_gradient", "a loss that clip_loss returned: give them to clip_loss")
    return ClipLoss(loss.settings)


def require_tensor(name: str, value: Any) -> None:
    """Raise ValueError, which names the argument, unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {value!r:.60}: give a tensor.")


def require_mask(mask: Any) -> None:
    """Raise ValueError unless the mask is a tensor of zeros and ones."""
    require_tensor("mask", mask)
    others = mask[(mask != 0) & (mask != 1)]
    if len(others):
        raise ValueError(
            f"mask has the value {others[0].item():g}: give True or 1 where a token counts, else False or 0."
        )


def require_numbers(name: str, value: Any) -> None:
    """Raise ValueError, which names the argument, unless it is a tensor of floating-point numbers."""
    require_tensor(name, value)
    if not value.is_floating_point():
        raise ValueError(f"{name} is {value.dtype}: give a tensor of floating-point numbers.")


def require_optional(tensors: dict[str, Any]) -> None:
    """Raise ValueError, which names the argument, for one of NEEDED that is given and has a wrong kind."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name == "group":
            require_tensor(name, tensor)
        else:
            require_numbers(name, tensor)


def require_decision(settings: Any, inputs: Inputs, decision: Any) -> None:
    """Raise ValueError unless a decision is of the size that the method decides."""
    require_numbers("decision", decision)
    expected = settings.method.decide(token_statistics(settings.method, settings.shaping, inputs)).shape
    if decision.shape != expected:
        shapes = f"decision is {tuple(decision.shape)}, but {settings.method.name} decides {tuple(expected)}"
        raise ValueError(f"{shapes}: give what this loss's `decide` returned.")


def factor(name: str, value: Any, log_prob: Tensor) -> Tensor:
    """Return what every token's loss is multiplied by, of log_prob's dtype, which broadcasts to its shape.

    Raises:
        ValueError: it is no number and no tensor of an allowed shape; names the argument.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.as_tensor(value).to(log_prob)
    require_numbers(name, value)
    sequences, length = log_prob.shape
    allowed = [(sequences, length), (sequences, 1), (1, length), (1, 1), ()]
    if tuple(value.shape) not in allowed:
        wanted = f"give a number, {(sequences, length)}, {(sequences, 1)} or {(1, length)}"
        # Of one dimension, it could be of the sequences or of the places, and broadcasting takes it for the latter.
        hint = f" For one number a sequence, write {name}[:, None]." if value.shape == (sequences,) else ""
        raise ValueError(f"{name} is {tuple(value.shape)}, but log_prob is {tuple(log_prob.shape)}: {wanted}.{hint}")
    return value.detach().to(log_prob)


def nothing_to_compare(mask: Tensor) -> str:
    """Return the message about tokens of which none can be compared."""
    if not mask.any():
        return "mask has no token: nothing can be compared."
    return (
        "the announced gradient is finite at no token in mask, so nothing can be compared. Look for NaN and infinity "
        "in log_prob, old_log_prob, advantages, aggregation, correction and decision."
    )


def aggregation_share(aggregation: str | Tensor | float, mask: Tensor, log_prob: Tensor) -> Tensor:
    """Return what the trainer multiplies each token's loss by, of log_prob's dtype, which broadcasts to its shape.

    Raises:
        ValueError: the aggregation is none of AGGREGATIONS, and neither a number nor a tensor that fits.
    """
    if not isinstance(aggregation, str):
        return factor("aggregation", aggregation, log_prob)
    share = sequence_weight(mask, aggregation, log_prob.dtype)
    if share is None:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}, or a tensor.")
    return torch.as_tensor(share).to(log_prob)


def patterns_of(inputs: Inputs, mask: Tensor, announced: Tensor, gradient: Tensor, wrong: Tensor) -> Iterator[str]:
    """Says of each kind of wrong token how its gradient differs, and at which ratios."""
    ratio = (inputs.log_prob - inputs.old_log_prob).exp()
    multiple = (gradient / announced)[wrong & (announced != 0)]
    if len(multiple) and (multiple / multiple[0] - 1).abs().max() < 1e-3:
        yield f"wherever one is announced it is {float(multiple[0]):.4g} times as large"
    none = gradient == 0
    not_finite = ~gradient.isfinite()
    kinds = {"one that is not finite": not_finite, "no gradient": none, "an unannounced gradient": announced == 0}
    kinds["another gradient"] = ~(none | not_finite | (announced == 0))
    sign = inputs.advantages.sign().where(mask, 2)
    places = {"with A > 0": sign == 1, "with A < 0": sign == -1, "with A = 0": sign == 0, "outside the mask": sign == 2}
    for words, of in kinds.items():
        for where, there in places.items():
            if (some := of & there & wrong).any():
                ends = " to ".join(f"{float(end):.4g}" for end in ratio[some].aminmax())
                yield f"{words} at {some.sum()} tokens {where} and ratios from {ends}"
