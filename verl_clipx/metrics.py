"""The metrics of a policy loss: sums over tokens, moved to the host in one transfer.

verl reduces a key that contains "max" or "min" by maximum or minimum, so no key here contains those letters.
"""

import torch
from torch import Tensor, where

from verl_clipx.methods.method import Bounds
from verl_clipx.tokens import Tokens

TOKENS = "tokens"

# L and H: below the lower or above the upper bound; N and P: negative or positive advantage; M: the rest.
REGIONS = ("LN", "HP", "LP", "HN", "M")

# A token's number: the sign of A times 1 below the bounds, 2 between them, 3 above; 0, where A is 0, is M too.
NUMBERS = {"LN": -1, "HP": 3, "LP": 1, "HN": -3, "M, A < 0": -2, "M, A > 0": 2}

# In the place of that number, for tokens that don't count.
OUTSIDE = 9.0

# Parts of the probability's range: for the gradient's mass, and for the spread of the ratio.
QUARTILES, SPREAD_BINS = 4, 8

# What `token_sums` adds up, in its order.
SUMMED = (
    *(TOKENS, "dual_clipped", "LN", "HP"),
    *("log_ratio", "ratio", "squared_ratio"),
    *(f"mass/{name}" for name in NUMBERS),
)
SPREAD = ("count", "deviation", "squared_deviation", "fourth_power")
DETAILED = (
    *("LP", "HN", "ratio_log_prob", "weighted", "weighted_log_prob"),
    *(f"quartile_{part}" for part in range(1, QUARTILES + 1)),
    *(f"{name}/bin_{part}" for name in SPREAD for part in range(SPREAD_BINS)),
)

# Sums that `mini_batch_metrics.py` makes metrics of, once they are those of the whole mini-batch.
SUM = "clipx/sum/"
MASS = "clipx/gradient_mass"

# The metrics that are linear in F * A.
OF_GRADIENT = (MASS, "clipx/contribution/", f"{SUM}weighted")


def token_sums(
    t: Tokens,
    bounded: Tensor,
    bounds: Bounds,
    weighted: Tensor,
    dual_clip: float | None,
    counted: Tensor | None,
    detailed: bool = False,
) -> Tensor:
    """Sums over tokens from which `token_metrics` makes the metrics.

    Args:
        t: the tokens.
        bounded: what the bounds act on, (sequences, length).
        bounds: clip bounds on it, broadcastable.
        weighted: F * A, (sequences, length), 0 outside the mask.
        dual_clip: tokens with A < 0 and a ratio above it are counted as dual_clipped; None: none are.
        counted: bool, (sequences, length): the tokens that count; None: those in the mask.
        detailed: whether to add up what only clipx.metrics=all logs.

    Returns:
        (len(SUMMED),) or, detailed, (len(SUMMED) + len(DETAILED),), float64; additive over any split of the tokens. The
        regions are those of DGPO, Eqs. 2-6: equal to a bound, and an advantage of 0, belong to M; PPO clips LN and HP
        and leaves LP and HN alone.
    """
    mask = t.mask if counted is None else t.mask & counted

    # A sequence in its own precision, the sequences in float64: no copy of all tokens in float64.
    def number(members: Tensor) -> Tensor:
        return members.sum(-1, dtype=torch.float32)

    def total(values: Tensor, members: Tensor) -> Tensor:
        return where(members, values, 0.0).sum(-1)

    ratio = where(mask, t.ratio, 0.0)
    sums = [total(t.log_ratio, mask), ratio.sum(-1), ratio.square().sum(-1)]
    del ratio
    # One number a token, since masks that several sums use would be stored, a byte at a time.
    side = where(bounded > bounds.high, 3.0, where(bounded < bounds.low, 1.0, 2.0))
    region = where(mask, t.advantages.sign() * side, OUTSIDE).to(t.ratio.dtype)
    del side
    mass = weighted.abs()
    if dual_clip is None:
        dual_clipped = mask.new_zeros(len(mask), dtype=torch.float32)
    else:
        dual_clipped = number(mask & (t.advantages < 0) & (t.ratio > dual_clip))
    counts = [number(mask), dual_clipped, *(number(region == NUMBERS[name]) for name in ("LN", "HP"))]
    found = [*counts, *sums, *(total(mass, region == place) for place in NUMBERS.values())]
    if detailed:
        found += [number(region == NUMBERS[name]) for name in ("LP", "HN")]
        found += [total(values, mask) for values in (t.ratio * t.log_prob, weighted, weighted * t.log_prob)]
        found += _by_probability(t, mass, mask)
    return torch.stack(found).sum(-1, dtype=torch.float64)


def _by_probability(t: Tokens, mass: Tensor, mask: Tensor) -> list[Tensor]:
    probability = t.old_log_prob.exp()

    def part(parts: int) -> Tensor:
        return where(mask, (probability * parts).floor().clamp(0, parts - 1), OUTSIDE)

    quartile, bin = part(QUARTILES), part(SPREAD_BINS)
    # As ACPO's statistics: in float32 the variance of a bin would be rounding where its tokens moved alike.
    deviation = t.ratio.to(torch.float64) - 1
    fourth = (-t.old_log_prob.to(torch.float64).expm1()) ** 4
    values = torch.ones_like(deviation), deviation, deviation.square(), fourth
    return [
        *(where(quartile == k, mass, 0.0).sum(-1) for k in range(QUARTILES)),
        *(where(bin == k, of_token, 0.0).sum(-1) for of_token in values for k in range(SPREAD_BINS)),
    ]


def token_metrics(sums: Tensor, *, dual_clipped: bool = False, detailed: bool = False) -> dict[str, Tensor]:
    """Sums over the tokens of a micro-batch that become means when divided by the number of tokens.

    Args:
        sums: from `token_sums`.
        dual_clipped: whether the method has a dual clip.
        detailed: as for `token_sums`.

    Returns:
        Metric name to a 0-d float64 tensor. Those named clipx/sum/… are for `mini_batch_metrics.py`. Gradient mass and
        contributions are sums of |F*A|. `tokens` is the number of tokens.
    """
    names = (*SUMMED, *DETAILED) if detailed else SUMMED
    found = dict(zip(names, sums.unbind(), strict=True))
    mass = {name: found[f"mass/{name}"] for name in NUMBERS}
    metrics = {
        TOKENS: found[TOKENS],
        "actor/ppo_kl": -found["log_ratio"],
        "clipx/ratio_mean": found["ratio"],
        "clipx/clip_fraction_low": found["LN"],
        "clipx/clip_fraction_high": found["HP"],
        "actor/pg_clipfrac": found["LN"] + found["HP"],
        **{f"{MASS}/{region}": mass[region] for region in REGIONS[:-1]},
        f"{MASS}/M": mass["M, A < 0"] + mass["M, A > 0"],
        "clipx/contribution/positive": mass["HP"] + mass["LP"] + mass["M, A > 0"],
        "clipx/contribution/negative": mass["LN"] + mass["HN"] + mass["M, A < 0"],
        f"{SUM}squared_ratio": found["squared_ratio"],
    }
    if dual_clipped:
        metrics["actor/pg_clipfrac_lower"] = found["dual_clipped"]
    if detailed:
        inside = found[TOKENS] - sum(found[region] for region in REGIONS[:-1])
        metrics |= {f"clipx/region_fraction/{name}": found[name] for name in ("LP", "HN")}
        metrics["clipx/region_fraction/M"] = inside
        for name in DETAILED[2:]:
            metrics[f"{MASS}_by_probability/{name}" if name.startswith("quartile") else f"{SUM}{name}"] = found[name]
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
