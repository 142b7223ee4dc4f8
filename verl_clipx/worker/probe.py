"""Makes up old log-probabilities and advantages on which any two losses differ."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.base.neighbours import MOVED
from verl_clipx.worker.layout import padded, response_part

# The log-ratio to the rollout policy, as a share of that to the old one, so that the two are told apart.
OF_ROLLOUT = 0.8

# As many probes in a row are of all kinds.
KINDS = 8


def log_ratios(number: int, method: Method, mask: Tensor, generator: torch.Generator) -> Tensor:
    """The log-ratios of a probe, of a kind that goes by its number: a centre and what lies around it, float32.

    Args:
        number: from 0.
        mask: bool, (sequences, response length), on the host.
    """

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape or mask.shape, generator=generator) * (high - low) + low

    rows, count, around = (len(mask), 1), mask.sum(-1, keepdim=True).clamp(min=1), draw(-1, 1)
    level = around - around.where(mask, 0.0).sum(-1, keepdim=True) / count
    size, narrow = 10 ** draw(-3, 1.5, *rows), 10 ** draw(-2, 0, 1, 1)
    numbers = torch.tensor([abs(value) for value in method.parameters.values() if isinstance(value, int | float)])
    edges = torch.cat([numbers, -numbers, numbers.log(), torch.zeros(1)]).clamp(-30, 30)
    edge = edges[(draw(0, 1) * len(edges)).long()]
    return (
        2.5 * around,
        0.5 * around,
        # A bound on a sequence's ratio may be on the mean or on the sum of its tokens' log-ratios, or reject by both.
        (draw(-1, 1, *rows) ** 3 + level) * size,
        # A narrow band around any ratio: of what adapts to the spread, the spread is then small beside the distance.
        draw(-1, 1, 1, 1) + narrow * around,
        # Most of a method's numbers are bounds on the ratio or on its logarithm.
        edge + 2 * MOVED * around * edge.abs().clamp(min=1),
        draw(-12, 12, *rows).expand(mask.shape),
        30 * around,
        (draw(-12, 12, *rows) / count).expand(mask.shape),
    )[number % KINDS]


def probe(number: int, method: Method, model_output: Any, data: Any) -> Any:
    """A copy of a micro-batch with log-ratios and advantages of our own: both signs of A, |A| from 0.1 to 10.

    Args:
        number: from 0; the same number makes the same probe.
        model_output, data: the arguments of verl's loss function.
    """
    generator, mask = torch.Generator().manual_seed(number), padded(data["response_mask"]).bool()
    current = response_part(model_output["log_probs"], data, mask.shape[1]).float()
    log_ratio = log_ratios(number, method, mask.cpu(), generator).to(mask.device)
    magnitude, signs, share = (torch.rand(shape, generator=generator) for shape in (mask.shape, mask.shape, (1, 1)))
    # What adapts to the balance of the signs is decided by all of them, from hardly any above 0 to all.
    positive = signs > (0.5 if number < KINDS else 1.2 * share - 0.1)
    # Without the mask of the trainer's rejection, which was by the real log-probabilities.
    copy = data.exclude("loss_mask")
    copy["old_log_probs"] = current - log_ratio
    if "rollout_log_probs" in data:
        copy["rollout_log_probs"] = current - OF_ROLLOUT * log_ratio
    advantages = 10 ** (2 * magnitude - 1) * positive.float().mul(2).sub(1)
    copy["advantages"] = advantages.to(mask.device, padded(data["advantages"]).dtype)
    return copy
