"""The metrics of a policy loss: sums over tokens, moved to the host in one transfer.

verl reduces a key that contains "max" or "min" by maximum or minimum, so no key here contains those letters.
"""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.regions import OUTER_REGIONS, REGIONS, region_members
from verl_clipx.masking import kept, less, spread

TOKENS = "tokens"


# What `token_sums` adds up, in its order: numbers of tokens, then sums of values.
COUNTED = (TOKENS, *OUTER_REGIONS, "dual_clipped")
SUMMED = ("log_ratio", "ratio", *(f"mass/{region}" for region in REGIONS))


def token_sums(
    *,
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    weight: Tensor,
    bounds: Bounds,
    bits: Tensor,
    dual_clip: float | None,
) -> Tensor:
    """Sums over tokens from which `token_metrics` makes the metrics.

    Args:
        ratio: importance-sampling ratio, (sequences, length), positive.
        log_ratio: its logarithm.
        advantages: (sequences, length), 0 outside the mask, so that a token there is in none of the outer regions.
        weight: gradient weight F, (sequences, length).
        bounds: clip bounds on the ratio, broadcastable.
        bits: the mask, as from `as_bits`, (sequences, length).
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.

    Returns:
        (len(COUNTED) + len(SUMMED),), float64; additive over any split of the tokens.
    """
    regions = region_members(ratio, advantages, bounds)
    counted = [bits, *(regions[region] for region in OUTER_REGIONS)]
    if dual_clip is None:
        counted.append(bits.new_zeros(1))
    else:
        counted.append(spread(less(advantages, 0.0) & less(dual_clip, ratio)))
    mass = (weight * advantages).abs_()
    summed = [(log_ratio, bits), (ratio, bits), *((mass, regions[region]) for region in REGIONS)]
    # Each sequence in its own precision, the sequences in float64: no copy of all tokens in float64.
    numbers = torch.stack([-tokens.sum(dtype=torch.int32) for tokens in counted])
    totals = torch.stack([kept(values, tokens).sum(-1) for values, tokens in summed]).sum(-1, dtype=torch.float64)
    return torch.cat([numbers.to(torch.float64), totals])


def token_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `token_sums`.

    Returns:
        Metric name to a 0-d float64 tensor. `region_fraction` and `gradient_mass` are split by DGPO's five regions;
        gradient mass is |F*A|. `tokens` is the number of tokens.
    """
    found = dict(zip((*COUNTED, *SUMMED), sums.unbind(), strict=True))
    counts = {region: found[region] for region in OUTER_REGIONS}
    counts["M"] = found[TOKENS] - sum(counts.values())
    metrics = {
        TOKENS: found[TOKENS],
        "actor/ppo_kl": -found["log_ratio"],
        "clipx/ratio_mean": found["ratio"],
        "clipx/clip_fraction_low": counts["LN"],
        "clipx/clip_fraction_high": counts["HP"],
        "actor/pg_clipfrac": counts["LN"] + counts["HP"],
        "actor/pg_clipfrac_lower": found["dual_clipped"],
    }
    for region in REGIONS:
        metrics[f"clipx/region_fraction/{region}"] = counts[region]
        metrics[f"clipx/gradient_mass/{region}"] = found[f"mass/{region}"]
    return metrics


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
