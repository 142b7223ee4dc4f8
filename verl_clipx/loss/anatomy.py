"""Where the importance-sampling ratio comes from: the parts of log(current / rollout probability), as histograms.

log(current / rollout) = log(old / rollout) + log(current / old). The first part contains the difference between two
engines with the same weights and, for tokens of older weights, the movement of the weights since then. The second part
contains the difference between two passes of the trainer with the same weights and the movement by this rollout batch's
updates. Each can be seen separately where the other is absent: old / rollout for tokens of age 0, and current / old in
the first update.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, where

from verl_clipx.base.histogram import histogram
from verl_clipx.base.method import Bounds, Method
from verl_clipx.base.metric import ANY_NAME
from verl_clipx.base.shared_metrics import (
    AGES,
    ANATOMY_OVER_BOUNDS,
    ANATOMY_P99_IN,
    ANATOMY_POSITIVE,
    ANATOMY_QUANTILES,
    POSITIONS,
    PROBABILITIES,
)
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.loss import tokens_in
from verl_clipx.modifiers.advantage_reweighting import AdvantageReweighting

# The parts, in this order: old / rollout probability with equal weights; the same for tokens of older or unknown
# weights; current / old probability with equal weights; the same after updates; current / rollout probability.
ENGINE, STALE, RECOMPUTATION, UPDATE, WHOLE = PARTS = (
    "engine_mismatch",
    "mismatch_and_staleness",
    "recomputation",
    "update",
    "all_parts",
)

# A bucket contains values of one sign and similar magnitude. Within the limits, neighbouring edges differ by 6.8 %.
SMALLEST, LARGEST, PER_SIDE = 1e-6, 20.0, 256
WIDTH = math.log(LARGEST / SMALLEST) / PER_SIDE
BUCKETS = 2 * PER_SIDE + 1

# The three ways in which tokens are divided, each into four classes.
KINDS = {"probability": PROBABILITIES, "age": AGES, "position": POSITIONS}
CLASSES = 4

# After the histograms follow, for each part, the number of tokens that it carries over the bounds and the number of
# tokens that were compared with bounds.
HISTOGRAMS = len(PARTS) * len(KINDS) * CLASSES * BUCKETS
SIZE = HISTOGRAMS + 2 * len(PARTS)


def anatomy_sums(
    method: Method,
    shaping: AdvantageReweighting | None,
    inputs: Inputs,
    decision: Tensor,
    *,
    rollout_log_prob: Tensor | None,
    age: Tensor | None,
    equal_weights: bool,
    bypass: bool,
) -> Tensor:
    """The histograms of a micro-batch's tokens, and how many tokens each part would carry over the bounds by itself.

    Args:
        rollout_log_prob: log-probabilities under the policy that sampled, (sequences, length), or None.
        age: weight versions since each sequence was sampled, int64, (sequences,); None if unknown.
        equal_weights: whether the current weights computed the old log-probabilities or, in bypass mode, are those from
            which the training on the rollout batch starts.
        bypass: whether the old log-probabilities are the rollout's.

    Returns:
        Whole numbers, (SIZE,), float64; additive over any split of the tokens.
    """
    mask = inputs.mask if inputs.counted is None else inputs.mask & inputs.counted
    current, old = inputs.log_prob.detach().to(torch.float64), inputs.old_log_prob.to(torch.float64)
    fresh = torch.zeros_like(mask) if age is None else (age == 0)[:, None].expand_as(mask)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if bypass:
        if equal_weights:
            found |= {ENGINE: (current - old, mask & fresh), STALE: (current - old, mask & ~fresh)}
        found[WHOLE] = current - old, mask
    else:
        found[RECOMPUTATION if equal_weights else UPDATE] = current - old, mask
        if rollout_log_prob is not None:
            rollout = rollout_log_prob.to(torch.float64)
            found |= {ENGINE: (old - rollout, mask & fresh), STALE: (old - rollout, mask & ~fresh)}
            found[WHOLE] = current - rollout, mask
    classes = {
        "probability": (old.exp() * CLASSES).floor().clamp(0, CLASSES - 1).nan_to_num(0.0).to(torch.int64),
        "age": None if age is None else age.clamp(max=CLASSES - 1)[:, None].expand_as(mask),
        "position": quarter_of_response(inputs.mask),
    }
    bounds = bounds_on_ratio(method, shaping, inputs, decision)
    nothing = torch.zeros(CLASSES * BUCKETS, dtype=torch.float64, device=mask.device)
    histograms, over = [], []
    for part in PARTS:
        values, members = found.get(part, (None, None))
        if values is None:
            histograms += [nothing] * len(KINDS)
            over.append(nothing[:2])
            continue
        members = members & values.isfinite()
        bucket = bucket_of(values)
        for kind in KINDS:
            of_class = classes[kind]
            counts = nothing if of_class is None else histogram(of_class * BUCKETS + bucket, members, len(nothing))
            histograms.append(counts)
        over.append(torch.zeros_like(nothing[:2]) if bounds is None else carried_over(values, members, bounds))
    return torch.cat([*histograms, *over])


def bucket_of(values: Tensor) -> Tensor:
    """The bucket of each value, int64 in [0, BUCKETS). Magnitudes below SMALLEST are in the middle one."""
    # Float32 is exact enough, because buckets are wide, and it makes the logarithm, which is most of the work, faster.
    values = values.to(torch.float32)
    magnitude = values.abs().nan_to_num(0.0)
    steps = (magnitude.clamp(min=SMALLEST).log() - math.log(SMALLEST)) / WIDTH
    number = where(magnitude < SMALLEST, 0.0, steps.floor().clamp(0, PER_SIDE - 1) + 1)
    return (values.sign().nan_to_num(0.0) * number).to(torch.int64) + PER_SIDE


def quarter_of_response(mask: Tensor) -> Tensor:
    """The quarter of its response that each token of the mask is in: int64 in [0, 4), (sequences, length)."""
    before = mask.cumsum(-1) - 1
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (before.clamp(min=0) * CLASSES // length).clamp(max=CLASSES - 1)


def bounds_on_ratio(
    method: Method, shaping: AdvantageReweighting | None, inputs: Inputs, decision: Tensor
) -> Bounds | None:
    """The bounds on the tokens' ratios; None for a method that bounds something else or nothing."""
    if type(method).bounded is not Method.bounded or not method.what_limits.acting:
        return None
    return method.bounds(tokens_in(method, shaping, inputs), decision)


def carried_over(values: Tensor, members: Tensor, bounds: Bounds) -> Tensor:
    """How many members' ratios would be outside the bounds with this part only, and how many members there are."""
    ratio = values.exp()
    outside = members & ((ratio > bounds.high) | (ratio < bounds.low))
    return torch.stack([outside.sum(dtype=torch.float64), members.sum(dtype=torch.float64)])


def anatomy_metrics(sums: Tensor) -> dict[str, float]:
    """The metrics of a rollout batch by key. Parts and classes without tokens are left out.

    Args:
        sums: the sums over all updates and ranks, (SIZE,).
    """
    sums = sums.to("cpu", torch.float64)
    counts = sums[:HISTOGRAMS].view(len(PARTS), len(KINDS), CLASSES, BUCKETS)
    found: dict[str, float] = {}
    for part, of_part, (outside, held) in zip(PARTS, counts, sums[HISTOGRAMS:].view(-1, 2).tolist(), strict=True):
        # Every token has a probability; not every one has an age.
        whole = of_part[0].sum(0)
        if whole.sum() == 0:
            continue
        of_number = {ANATOMY_POSITIVE: float(whole[PER_SIDE + 1 :].sum() / whole.sum())}
        of_number |= {metric: quantile(whole, share) for share, metric in ANATOMY_QUANTILES.items()}
        if held:
            of_number[ANATOMY_OVER_BOUNDS] = outside / held
        found |= {metric.key.replace(ANY_NAME, part): value for metric, value in of_number.items()}
        found |= _by_class(part, dict(zip(KINDS, of_part, strict=True)))
    return found


def _by_class(part: str, counts: Mapping[str, Tensor]) -> dict[str, float]:
    found = {}
    for kind, of_kind in counts.items():
        present = [index for index in range(CLASSES) if of_kind[index].sum() > 0]
        # A single class would repeat the part's own number.
        for index in present if len(present) > 1 else ():
            metric = ANATOMY_P99_IN[KINDS[kind][index]]
            found[metric.key.replace(ANY_NAME, part)] = quantile(of_kind[index], 0.99)
    return found


def quantile(counts: Tensor, share: float) -> float:
    """The quantile of the values' magnitudes, in nats, exact to half a bucket's width (3.4 %).

    Args:
        counts: the buckets' counts, (BUCKETS,); at least one is above 0.
        share: the share of the values that are at most as large, in (0, 1].
    """
    folded = counts[PER_SIDE:].clone()
    folded[1:] += counts[:PER_SIDE].flip(0)
    reached = int((folded.cumsum(0) < share * folded.sum()).sum())
    return 0.0 if reached == 0 else SMALLEST * math.exp((reached - 0.5) * WIDTH)
