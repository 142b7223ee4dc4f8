"""The metrics of a policy loss: sums over tokens, moved to the host in one transfer.

verl reduces a key that contains "max" or "min" by maximum or minimum, so no key here contains those letters.
"""

import torch
from torch import Tensor, where

from verl_clipx.methods.method import Bounds
from verl_clipx.tokens import Tokens

TOKENS = "tokens"

# L and H: below the lower or above the upper bound; N and P: negative or positive advantage; M: the rest.
OUTER_REGIONS = ("LN", "HP", "LP", "HN")
REGIONS = (*OUTER_REGIONS, "M")

# What `token_sums` adds up, in its order: numbers of tokens, then sums of values.
COUNTED = (TOKENS, "dual_clipped", *OUTER_REGIONS)
SUMMED = ("log_ratio", "ratio", *(f"mass/{region}" for region in REGIONS))

# In the place of a region's number, for tokens that don't count.
OUTSIDE = 9.0


def token_sums(
    t: Tokens, bounded: Tensor, bounds: Bounds, weighted: Tensor, dual_clip: float | None, counted: Tensor | None
) -> Tensor:
    """Sums over tokens from which `token_metrics` makes the metrics.

    Args:
        t: the tokens.
        bounded: what the bounds act on, (sequences, length).
        bounds: clip bounds on it, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.

    Returns:
        (len(COUNTED) + len(SUMMED),), float64; additive over any split of the tokens. The regions are those of DGPO,
        Eqs. 2-6: equal to a bound, and an advantage of 0, belong to M; PPO clips LN and HP and leaves LP and HN alone.
    """
    mask = t.mask if counted is None else t.mask & counted
    region = where(bounded > bounds.high, 3.0, where(bounded < bounds.low, -3.0, 0.0))
    # One number a token, since masks that several sums use would be stored, a byte at a time: LN -4, HP 4, LP -2, HN 2.
    region = where(mask, region + t.advantages.sign(), OUTSIDE).to(t.ratio.dtype)
    mass = weighted.abs()

    # A sequence in its own precision, the sequences in float64: no copy of all tokens in float64.
    def number(members: Tensor) -> Tensor:
        return members.sum(-1, dtype=torch.float32)

    def total(values: Tensor, members: Tensor) -> Tensor:
        return where(members, values, 0.0).sum(-1)

    dual_clipped = mask & False if dual_clip is None else mask & (t.advantages < 0) & (t.ratio > dual_clip)
    counts = [number(mask), number(dual_clipped), *(number(region == k) for k in (-4, 4, -2, 2))]
    masses = [total(mass, region == k) for k in (-4, 4, -2, 2)]
    inner = total(mass, (region.abs() <= 1) | (region.abs() == 3))
    sums = [total(t.log_ratio, mask), total(t.ratio, mask), *masses, inner]
    return torch.stack([*counts, *sums]).sum(-1, dtype=torch.float64)


def token_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `token_sums`.

    Returns:
        Metric name to a 0-d float64 tensor. `region_fraction` and `gradient_mass` are split by DGPO's five regions;
        gradient mass is |F*A|. `tokens` is the number of tokens.
    """
    found = dict(zip((*COUNTED, *SUMMED), sums.unbind(), strict=True))
    found["M"] = found[TOKENS] - sum(found[region] for region in OUTER_REGIONS)
    metrics = {
        TOKENS: found[TOKENS],
        "actor/ppo_kl": -found["log_ratio"],
        "clipx/ratio_mean": found["ratio"],
        "clipx/clip_fraction_low": found["LN"],
        "clipx/clip_fraction_high": found["HP"],
        "actor/pg_clipfrac": found["LN"] + found["HP"],
        "actor/pg_clipfrac_lower": found["dual_clipped"],
    }
    for region in REGIONS:
        metrics[f"clipx/region_fraction/{region}"] = found[region]
        metrics[f"clipx/gradient_mass/{region}"] = found[f"mass/{region}"]
    return metrics


def to_host(*groups: dict[str, Tensor]) -> list[dict[str, float]]:
    """Moves groups of 0-d tensors to the host in one transfer.

    Args:
        groups: name to 0-d tensor, all on one device.

    Returns:
        The same groups with Python floats.
    """
    tensors = [tensor.to(torch.float64) for group in groups for tensor in group.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(numbers) for name in group} for group in groups]
