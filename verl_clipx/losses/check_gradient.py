"""Compares the gradient of any trainer's loss with that of an announced loss, and names the tokens that differ."""

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
from verl_clipx.losses.settings import LossSettings

# The aggregations that `check_gradient` knows by name, which are verl's.
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


class GradientCheck(NamedTuple):
    """The result of `check_gradient`. It is true if no token differs.

    Args:
        difference: the largest difference of a token's gradient from the announced one, relative to the size of the
            token's announced gradient; infinite if the trainer's gradient is not finite somewhere.
        tokens: the sequence and the position of each token that differs, int64, (tokens, 2).
        pattern: which tokens differ, in words; empty if no token differs.
        not_compared: how many tokens of the mask have an announced gradient that is not finite.
    """

    difference: float
    tokens: Tensor
    pattern: str
    not_compared: int = 0

    def __bool__(self) -> bool:
        return not self.pattern

    def __str__(self) -> str:
        size = f"{self.difference:.1e} of a token's gradient"
        if self:
            verdict = f"the gradient is the announced one; no token differs by more than {size}."
        else:
            first = ", ".join(f"{sequence}:{position}" for sequence, position in self.tokens[:5].tolist())
            verdict = (
                f"{len(self.tokens)} tokens differ by up to {size}, first (sequence:token) {first}: {self.pattern}."
            )
        if not self.not_compared:
            return verdict
        return f"{verdict} Not compared: {self.not_compared} tokens whose announced gradient is not finite."


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

    Give it ratios beyond every bound and advantages of both signs, because at ratio 1 nearly all losses are alike. A
    token whose announced gradient is not finite, such as one with a NaN in its inputs, is not compared.

    Args:
        log_prob, old_log_prob, advantages, mask, decision: as for `ClipLoss`.
        gradient: the gradient of the trainer's scalar loss with respect to log_prob, (sequences, length).
        loss: a name as for `clip_loss`, or a loss that `clip_loss` returned, for example one with a modifier `mask`.
        aggregation: one of AGGREGATIONS over the tokens in `mask`, or the factor by which the trainer multiplies each
            token's loss: a number or a tensor, as for `correction`.
        correction: the announced weights of a rollout correction: a number; or a tensor of shape (sequences, length),
            of shape (sequences, 1) for one weight per sequence, or of shape (1, length) for one weight per position.
        **further: rollout_log_prob, entropy and group as for `ClipLoss`, and parameters of the loss.

    Raises:
        ValueError: an argument has a wrong type, shape or dtype, or is not known; or no token can be compared.
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
    announced_loss = make_announced_loss(loss, further)
    settings = announced_loss.settings
    log_prob = log_prob.detach().to(torch.promote_types(log_prob.dtype, torch.float32))
    inputs = announced_loss.inputs(log_prob, old_log_prob, advantages, mask, **optional)
    shape = tuple(log_prob.shape)
    if tuple(gradient.shape) != shape:
        raise ValueError(f"gradient is {tuple(gradient.shape)}, but log_prob is {shape}: give {shape}.")
    if decision is not None:
        require_decision(settings, inputs, decision)
    mask = mask.bool()
    aggregation_factor = make_aggregation_factor(aggregation, mask, log_prob)
    share = aggregation_factor * make_factor("correction", correction, log_prob)
    gradient = gradient.detach().to(log_prob)

    def announce_gradient(shift: float) -> Tensor:
        """Return the gradient of the announced loss if log_prob is moved by `shift`, (sequences, length)."""
        moved_inputs = inputs._replace(log_prob=inputs.log_prob + shift)
        weighted = apply(settings.method, settings.shaping, moved_inputs, decision).weighted
        # Outside the mask the gradient is set to 0. The factor of a mean over an empty mask is infinite, and 0 times
        # infinity would be NaN.
        return torch.where(inputs.mask, -weighted * share, 0.0)

    announced = announce_gradient(0.0)
    # Rounding may put a token on either side of a bound, so the gradients on both sides count as announced.
    announced_gradients = torch.stack([announced, announce_gradient(ROUNDING), announce_gradient(-ROUNDING)])
    at_ratio_1 = (inputs.advantages * share).where(inputs.mask, 0)
    difference = apart(gradient, announced_gradients, at_ratio_1, besides=torch.zeros_like(gradient))
    is_compared = mask & ~difference.isnan()
    if not is_compared.any():
        raise ValueError(explain_nothing_to_compare(mask))
    if not (at_ratio_1[is_compared].any() or gradient[is_compared].any()):
        raise ValueError(
            "every announced gradient is 0, whatever the loss, so nothing can be compared: give advantages, an "
            "aggregation and a correction that are not 0 everywhere."
        )
    is_wrong = difference > resolved
    return GradientCheck(
        # Adding 0 turns -0.0 into 0.0.
        difference=largest_known(difference) + 0.0,
        tokens=is_wrong.nonzero(),
        pattern="; ".join(describe_wrong_tokens(inputs, mask, announced, gradient, is_wrong)),
        not_compared=int((mask & ~is_compared).sum()),
    )


def make_announced_loss(loss: str | ClipLoss, parameters: dict[str, Any]) -> ClipLoss:
    """Return the announced loss.

    Args:
        loss: a name as for `clip_loss`, or a loss that `clip_loss` returned.
        parameters: the parameters of a loss that is given by its name. A loss that `clip_loss` returned has its own
            parameters and takes no others.

    Raises:
        ValueError: `loss` is neither of the two, or a parameter is not known.
    """
    if isinstance(loss, str):
        return clip_loss(loss, **parameters)
    if not isinstance(loss, ClipLoss):
        raise ValueError(f"loss is {loss!r}: give a name, such as 'dapo', or what clip_loss returned.")
    if parameters:
        reject_unknown(parameters, NEEDED, "check_gradient", "a loss that clip_loss returned: give them to clip_loss")
    return ClipLoss(loss.settings)


def require_tensor(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is a tensor; the message names the argument."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {value!r:.60}: give a tensor.")


def require_mask(mask: Any) -> None:
    """Raise ValueError unless the mask is a tensor of zeros and ones."""
    require_tensor("mask", mask)
    other_values = mask[(mask != 0) & (mask != 1)]
    if len(other_values):
        raise ValueError(
            f"mask has the value {other_values[0].item():g}: give True or 1 where a token counts, else False or 0."
        )


def require_numbers(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is a tensor of floating-point numbers; the message names the argument."""
    require_tensor(name, value)
    if not value.is_floating_point():
        raise ValueError(f"{name} is {value.dtype}: give a tensor of floating-point numbers.")


def require_optional(tensors: dict[str, Any]) -> None:
    """Raise ValueError if one of the optional tensors (NEEDED) has a wrong type; the message names the argument."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name == "group":
            require_tensor(name, tensor)
        else:
            require_numbers(name, tensor)


def require_decision(settings: LossSettings, inputs: Inputs, decision: Any) -> None:
    """Raise ValueError unless a decision has the shape that the method's decisions have.

    Args:
        settings: the settings of the announced loss.
        inputs: the tokens that are compared.
        decision: the argument that the user gave: the vector from which the method's bounds follow.
    """
    require_numbers("decision", decision)
    statistics = token_statistics(settings.method, settings.shaping, inputs)
    expected = tuple(settings.method.decide(statistics).shape)
    if tuple(decision.shape) != expected:
        raise ValueError(
            f"decision has the shape {tuple(decision.shape)}, but a decision of {settings.method.name} has the shape "
            f"{expected}. Give what `decide` of this loss returned."
        )


def make_factor(name: str, value: Any, log_prob: Tensor) -> Tensor:
    """Return the factor of every token's loss as a detached tensor.

    Args:
        name: the name of the argument that the user gave, for the message.
        value: the argument: a number; or a floating-point tensor of shape (sequences, length), of shape (sequences, 1)
            for one number per sequence, or of shape (1, length) for one number per position. A tensor of one number,
            () or (1, 1), is allowed too.
        log_prob: (sequences, length).

    Returns:
        The factor, with log_prob's dtype and device; it broadcasts to log_prob's shape.

    Raises:
        ValueError: the value is neither a number nor a floating-point tensor of an allowed shape. The message names the
            argument.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.as_tensor(value).to(log_prob)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {value!r:.60}: give a number or a tensor.")
    require_numbers(name, value)
    sequences, length = log_prob.shape
    allowed_shapes = [(sequences, length), (sequences, 1), (1, length), (1, 1), ()]
    if tuple(value.shape) not in allowed_shapes:
        advice = f"give a number, {(sequences, length)}, {(sequences, 1)} or {(1, length)}."
        if value.shape == (sequences,):
            # Broadcasting would take a tensor of one dimension for one number per position.
            advice += f" For one number per sequence, write {name}[:, None]."
        raise ValueError(f"{name} is {tuple(value.shape)}, but log_prob is {tuple(log_prob.shape)}: {advice}")
    return value.detach().to(log_prob)


def explain_nothing_to_compare(mask: Tensor) -> str:
    """Return the message for the case that no token of the mask can be compared."""
    if not mask.any():
        return "mask has no token: nothing can be compared."
    return (
        "no token in mask has a finite announced gradient, so nothing can be compared. Look for NaN and infinity "
        "in log_prob, old_log_prob, advantages, aggregation, correction and decision."
    )


def make_aggregation_factor(aggregation: str | Tensor | float, mask: Tensor, log_prob: Tensor) -> Tensor:
    """Return the factor by which the trainer's aggregation multiplies each token's loss.

    Args:
        aggregation: as for `check_gradient`.
        mask: bool, (sequences, length).
        log_prob: (sequences, length).

    Returns:
        The factor, with log_prob's dtype and device; it broadcasts to log_prob's shape.

    Raises:
        ValueError: the aggregation is none of AGGREGATIONS, and neither a number nor a tensor that fits.
    """
    if not isinstance(aggregation, str):
        return make_factor("aggregation", aggregation, log_prob)
    weight = sequence_weight(mask, aggregation, log_prob.dtype)
    if weight is None:
        raise ValueError(f"aggregation={aggregation!r} must be one of {', '.join(AGGREGATIONS)}, a number or a tensor.")
    return torch.as_tensor(weight).to(log_prob)


def describe_wrong_tokens(
    inputs: Inputs, mask: Tensor, announced: Tensor, gradient: Tensor, is_wrong: Tensor
) -> Iterator[str]:
    """Yield, for each kind of wrong token, how its gradient differs, how many there are, and at which ratios.

    Args:
        inputs: the tokens that were compared.
        mask: bool, like every tensor here (sequences, length).
        announced: the announced gradient.
        gradient: the trainer's gradient.
        is_wrong: the tokens whose gradients differ, bool.
    """
    ratio = (inputs.log_prob - inputs.old_log_prob).exp()
    multiples = (gradient / announced)[is_wrong & (announced != 0)]
    if len(multiples) and (multiples / multiples[0] - 1).abs().max() < 1e-3:
        yield f"where the announced gradient is not 0, the trainer's is {float(multiples[0]):.4g} times as large"
    is_missing = gradient == 0
    is_not_finite = ~gradient.isfinite()
    is_unannounced = announced == 0
    kinds = {
        "a gradient that is not finite": is_not_finite,
        "no gradient": is_missing,
        "an unannounced gradient": is_unannounced,
        "another gradient": ~(is_missing | is_not_finite | is_unannounced),
    }
    sides = {
        "with A > 0": mask & (inputs.advantages > 0),
        "with A < 0": mask & (inputs.advantages < 0),
        "with A = 0": mask & (inputs.advantages == 0),
        "outside the mask": ~mask,
    }
    for kind, is_of_kind in kinds.items():
        for side, is_on_side in sides.items():
            is_described = is_of_kind & is_on_side & is_wrong
            if not is_described.any():
                continue
            lowest, highest = ratio[is_described].aminmax()
            yield (
                f"{kind} at {is_described.sum()} tokens {side} and ratios from {float(lowest):.4g} to "
                f"{float(highest):.4g}"
            )
