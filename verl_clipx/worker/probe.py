"""Makes up old log-probabilities and advantages on which any two losses differ."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.neighbours import MOVED
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.loss import apply, tokens_in
from verl_clipx.run.config import Settings
from verl_clipx.worker.layout import pad_rows

# The log-ratio to the rollout policy, as a share of that to the old one, so that the two are told apart.
OF_ROLLOUT = 0.8
# As many probes in a row are of all kinds.
KINDS = 9


def probe(number: int, settings: Settings, decision: Tensor | None, inputs: Inputs, data: Any) -> Any:
    """A copy of a micro-batch with log-ratios of the number's kind, both signs of A, and |A| from 0.1 to 10.

    Args:
        number: from 0; the same number makes the same probe.
        decision, inputs: as for `loss.apply`.
        data: verl's micro-batch.
    """
    generator, mask, method = torch.Generator().manual_seed(number), inputs.mask.cpu(), settings.method

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape or mask.shape, generator=generator) * (high - low) + low

    # What adapts to the balance of the signs is decided by all of them, from hardly any above 0 to all.
    positive = draw(0, 1) > (draw(-0.1, 1.1, 1, 1) if number >= KINDS else 0.5)
    advantages = 10 ** draw(-1, 1) * positive.float().mul(2).sub(1)
    rows, count, around = (len(mask), 1), mask.sum(-1, keepdim=True).clamp(min=1), draw(-1, 1)
    level = around - around.where(mask, 0.0).sum(-1, keepdim=True) / count
    size, narrow, centre = 10 ** draw(-3, 1.5, *rows), 10 ** draw(-2, 0, 1, 1), draw(-1, 1, 1, 1)
    numbers = torch.tensor([abs(value) for value in method.parameters.values() if isinstance(value, int | float)])
    ratios = torch.cat([numbers, 1 + numbers, (1 - numbers).abs(), torch.ones(1)])
    edges = torch.cat([numbers, -numbers, ratios.log()]).clamp(-30, 30)

    def at_parameters(*shape: int) -> Tensor:
        # Most of a method's numbers are bounds on the ratio or on its logarithm, of a token or of a sequence.
        edge = edges[(draw(0, 1, *shape) * len(edges)).long()]
        return edge + MOVED * draw(-1, 1, *shape) * edge.abs().clamp(min=1)

    def with_ratios(log_ratio: Tensor) -> Inputs:
        device, current = inputs.mask.device, inputs.log_prob.float()
        old, rollout = (current - share * log_ratio.to(device) for share in (1, OF_ROLLOUT))
        return inputs._replace(old_log_prob=old, advantages=advantages.to(device), rollout_log_prob=rollout)

    def at_bounds(log_ratio: Tensor) -> Tensor:
        bounds = apply(method, settings.shaping, with_ratios(log_ratio), decision).bounds
        bound = torch.where(positive.to(inputs.mask.device), bounds.high, bounds.low)
        low, high = torch.full(mask.shape, -5.0), torch.full(mask.shape, 5.0)
        # What the bounds act on, the ratio or a divergence, grows with the log-ratio.
        for _ in range(16):
            middle = (low + high) / 2
            below = (method.bounded(tokens_in(method, settings.shaping, with_ratios(middle))) < bound).cpu()
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return middle + narrow**1.5 * around

    log_ratio = (
        lambda: 2.5 * around,
        lambda: 0.5 * around,
        # A bound on a sequence's ratio may be on the mean or on the sum of its tokens' log-ratios, or reject by both.
        lambda: (draw(-1, 1, *rows) ** 3 + level) * size,
        # A narrow band around any ratio: of what adapts to the spread, the spread is then small beside the distance.
        lambda: centre + narrow * around,
        # Bounds that adapt move less than the tokens that are put there.
        lambda: at_bounds(at_bounds(at_bounds(narrow**1.5 * around))),
        lambda: at_parameters(*mask.shape),
        lambda: at_parameters(*rows).expand(mask.shape),
        lambda: (at_parameters(*rows) / count).expand(mask.shape),
        lambda: 30 * around,
    )[number % KINDS]()
    if number % 2 and number >= KINDS:
        # What adapts to the balance of the signs is decided where it is one of the method's numbers.
        mass = (advantages.abs() * log_ratio.clamp(-5, 5).exp()).where(mask, 0.0)
        shares = torch.cat([numbers[(numbers > MOVED) & (numbers < 1)], torch.full((1,), 0.5)])
        shares = torch.cat([shares, shares / (1 - shares)])[int(draw(0, 2, 1) * len(shares))]
        balance = shares * (1 + 2 * MOVED * draw(-1, 1, 1, 1)) * mass.where(~positive, 0.0).sum()
        advantages = advantages * torch.where(positive, balance / mass.where(positive, 0.0).sum(), 1).clamp(0.01, 100)
    made_up = with_ratios(log_ratio)
    # Without the mask of the trainer's rejection, which was by the real log-probabilities.
    copy, dtype = data.exclude("loss_mask"), pad_rows(data["advantages"]).dtype
    copy["old_log_probs"], copy["advantages"] = made_up.old_log_prob, made_up.advantages.to(dtype)
    if "rollout_log_probs" in data:
        copy["rollout_log_probs"] = made_up.rollout_log_prob
    return copy
