"""The metrics of a policy loss: sums over tokens, moved to the host in one transfer.

verl reduces a key that contains "max" or "min" by maximum or minimum, so no key here contains those letters.
"""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.masking import as_bits, below, kept, number
from verl_clipx.losses.regions import OUTER_REGIONS, region_members

TOKENS = "tokens"


def token_sums(
    *,
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    weight: Tensor,
    bounds: Bounds,
    mask: Tensor,
    dual_clip: float | None,
) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        ratio: importance-sampling ratio, (sequences, length), positive.
        log_ratio: its logarithm.
        advantages: (sequences, length).
        weight: gradient weight F, (sequences, length).
        bounds: clip bounds on the ratio, broadcastable.
        mask: bool, (sequences, length).
        dual_clip: tokens with A < 0 and a ratio above it are counted in actor/pg_clipfrac_lower; None: none are.

    Returns:
        Metric name to a 0-d float64 tensor. `region_fraction` and `gradient_mass` are split by DGPO's five regions;
        gradient mass is |F*A|. `tokens` is the number of tokens.
    """
    bits = as_bits(mask, ratio.dtype)
    # Where A is 0 a token is in none of the four outer regions.
    advantages = kept(advantages, bits)
    mass = (weight * advantages).abs_()

    def total(values: Tensor) -> Tensor:
        # Each sequence in its own precision, the sequences in float64: no copy of all tokens in float64.
        return values.sum(-1).sum(dtype=torch.float64)

    sums = {TOKENS: number(bits)}
    sums["actor/ppo_kl"] = -total(kept(log_ratio, bits))
    sums["clipx/ratio_mean"] = total(kept(ratio, bits))
    regions = region_members(ratio, advantages, bounds)
    counts = {region: number(regions[region]) for region in OUTER_REGIONS}
    counts["M"] = sums[TOKENS] - sum(counts.values())
    for region, members in regions.items():
        sums[f"clipx/region_fraction/{region}"] = counts[region]
        sums[f"clipx/gradient_mass/{region}"] = total(kept(mass, members))
    sums["clipx/clip_fraction_low"] = counts["LN"]
    sums["clipx/clip_fraction_high"] = counts["HP"]
    sums["actor/pg_clipfrac"] = counts["LN"] + counts["HP"]
    if dual_clip is None:
        sums["actor/pg_clipfrac_lower"] = torch.zeros_like(sums[TOKENS])
    else:
        sums["actor/pg_clipfrac_lower"] = number(below(advantages, 0.0) & below(dual_clip, ratio))
    return sums


def to_host(*groups: dict[str, Tensor]) -> list[dict[str, float]]:
    """Moves groups of 0-d tensors to the host in one transfer.

    Args:
        groups: name to 0-d tensor, all on one device.

    Returns:
        The same groups with Python floats.
    """
    names = [(index, name) for index, group in enumerate(groups) for name in group]
    if not names:
        return [{} for _ in groups]
    numbers = torch.stack([groups[index][name].to(torch.float64) for index, name in names]).tolist()
    result: list[dict[str, float]] = [{} for _ in groups]
    for (index, name), value in zip(names, numbers, strict=True):
        result[index][name] = value
    return result
