"""A micro-batch on which any two losses differ, and the comparison of two gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.worker.layout import flat, padded, response_part

# Ratios of the probe. In the order of the tokens both signs of A come at each, and neighbours are far apart.
RATIOS = (0.3, 4.0)
STEPS, STRIDE = 31, 12

# Of the probes under rejection, which neighbouring sequences take in turn: how far the log-ratios are from 0, as a
# factor, and whether their mean over the sequence is 0. Any of verl's criteria finds some too far and some not.
PROBES = ((1.0, False), (1.0, True), (0.1, True), (0.003, True))

# By how much of the largest gradient two may differ, in units of what log_prob's dtype resolves.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Difference(NamedTuple):
    """Two gradients compared.

    Args:
        largest: difference between two of their elements, over the largest element of the expected one.
        allowed: how large it may be.
        tokens: how many elements were compared.
    """

    largest: float
    allowed: float
    tokens: int


def probed(model_output: Any, data: Any, probes: Sequence[tuple[float, bool]] = PROBES[:1]) -> Any:
    """A micro-batch with the receipt's old log-probabilities and advantages; the given one is not changed.

    Args:
        model_output, data: verl's loss function's arguments.
        probes: of `PROBES`, which the sequences take in turn.
    """
    mask = padded(data["response_mask"]).bool()
    number = mask.flatten().cumsum(0).view(mask.shape) - 1
    low, high = (math.log(ratio) for ratio in RATIOS)
    log_ratio = low + (high - low) * (number * STRIDE % STEPS) / (STEPS - 1)
    scales, centred = (
        torch.tensor([probe[part] for probe in probes], device=mask.device)[torch.arange(len(mask)) % len(probes), None]
        for part in (0, 1)
    )
    mean = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = scales * (log_ratio - torch.where(centred, mean, 0.0))
    sign = 1 - 2 * (number % 2)
    probe = data.copy()
    probe["old_log_probs"] = response_part(model_output["log_probs"], data, mask.shape[1]).float() - log_ratio
    probe["advantages"] = (sign * (1 + number % 7) / 4).to(padded(data["advantages"]).dtype)
    return probe


def leaf_of(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's output without its graph, and the log-probabilities in it as a leaf, (tokens,)."""
    output = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    log_probs = output["log_probs"]
    leaf = flat(log_probs).clone().requires_grad_()
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, offsets=log_probs.offsets()) if nested else leaf
    return output, leaf


@contextmanager
def no_policy_loss() -> Iterator[None]:
    """Has each of the plugin's registered losses return nothing for the duration of the block."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    ours = {name: loss for name, loss in POLICY_LOSS_REGISTRY.items() if name.startswith("clipx_")}
    POLICY_LOSS_REGISTRY.update(dict.fromkeys(ours, lambda *, log_prob, **_: (log_prob.sum() * 0.0, {})))
    try:
        yield
    finally:
        POLICY_LOSS_REGISTRY.update(ours)


def difference(found: Tensor, expected: Tensor) -> Difference | None:
    """How far a gradient is from the expected one; None where there is nothing to compare.

    Args:
        found, expected: of the same shape.
    """
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    apart = float((found.to(expected.dtype) - expected).abs().max()) if expected.numel() else 0.0
    # An update that is not finite says nothing, and verl skips it.
    if not (math.isfinite(largest) and math.isfinite(apart)) or largest == apart == 0.0:
        return None
    return Difference(apart / largest if largest else math.inf, RESOLVED[found.dtype], expected.numel())
