"""Makes a micro-batch on which any two losses differ, and compares gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.worker.layout import flat, padded, response_part

# The range of the probe's ratios. STEPS values in it are spread over the tokens in strides, so that neighbours are far
# apart and every value occurs with both signs of A.
RATIOS = (0.3, 4.0)
STEPS, STRIDE = 31, 12

# The probes, which neighbouring sequences take in turn if the run rejects tokens: a factor on the log-ratios, and
# whether their mean over the sequence is moved to 0. Each of verl's criteria then rejects some tokens and keeps others.
PROBES = ((1.0, False), (1.0, True), (0.1, True), (0.003, True))

# How far two gradients may differ, relative to the largest element, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Difference(NamedTuple):
    """The result of comparing two gradients.

    Args:
        largest: the largest difference of two elements, relative to the largest element of the expected gradient.
        allowed: how large this difference may be.
        tokens: how many elements were compared.
    """

    largest: float
    allowed: float
    tokens: int


def probed(model_output: Any, data: Any, probes: Sequence[tuple[float, bool]] = PROBES[:1]) -> Any:
    """A copy of a micro-batch with old log-probabilities and advantages that the receipt makes up.

    Args:
        model_output, data: the arguments of verl's loss function.
        probes: those of `PROBES` that the sequences take in turn.
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
    """The model's output without its graph, and its log-probabilities as a new leaf, (tokens,)."""
    output = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    log_probs = output["log_probs"]
    leaf = flat(log_probs).clone().requires_grad_()
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, offsets=log_probs.offsets()) if nested else leaf
    return output, leaf


@contextmanager
def no_policy_loss() -> Iterator[None]:
    """Makes each of the plugin's registered losses return 0 for the duration of the block."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    ours = {name: loss for name, loss in POLICY_LOSS_REGISTRY.items() if name.startswith("clipx_")}
    POLICY_LOSS_REGISTRY.update(dict.fromkeys(ours, lambda *, log_prob, **_: (log_prob.sum() * 0.0, {})))
    try:
        yield
    finally:
        POLICY_LOSS_REGISTRY.update(ours)


def difference(found: Tensor, expected: Tensor) -> Difference | None:
    """How far a gradient is from the expected one; None if they are empty, all 0, or not finite.

    Args:
        found, expected: two tensors of the same shape.
    """
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    apart = float((found.to(expected.dtype) - expected).abs().max()) if expected.numel() else 0.0
    # An update that is not finite cannot be compared, and verl skips it.
    if not (math.isfinite(largest) and math.isfinite(apart)) or largest == apart == 0.0:
        return None
    return Difference(apart / largest if largest else math.inf, RESOLVED[found.dtype], expected.numel())
