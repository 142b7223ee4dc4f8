"""Judges from log-probabilities which weights a sampler used, at which precision, and what shifted its distribution.

The functions here take only arrays: the log-probabilities that a sampler recorded of its tokens, and those that
checkpoints give the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy

from verl_clipx.common.statistics.bootstrap import FEWEST_UNITS, percentile_interval, resamples

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
PRECISIONS = (FLOAT32, BFLOAT16)
# The precision in a judgement if it cannot be seen: tokens left out raise log-probabilities by so much that rounding
# would not show.
EITHER = "float32 or bfloat16"
# How configurations write precisions that do not round weights.
UNROUNDED = ("float32", "fp32", "float64")
# How far two passes in float32 are apart at most, in nats: on average, and for 99 % of the tokens.
MEAN_LIMIT = 1e-4
QUANTILE_LIMIT = 1e-3
LIMITS = numpy.array([MEAN_LIMIT, QUANTILE_LIMIT])
# Two engines that round to bfloat16 are √2 times as far apart, on average, as rounding moves a log-probability. This
# many times is allowed.
ENGINES_APART = 2.0
# How often the responses are drawn anew for a bootstrap.
REPLICATES = 200
# If rounding changes a response by this much on average, in nats, a sampler that rounds can't be exact by chance.
ROUNDING_SEEN = 10 * MEAN_LIMIT
# A response is of other weights if the number of its tokens that are nearer to these, minus the number of those that
# are not, exceeds this many standard deviations of what chance gives. A standard deviation is √tokens.
SIGN_LIMIT = 5.0
# Leaving tokens out raises the others' log-probabilities: the rises are at least this many times as large as the falls.
ONE_SIDED = 10.0
# Another temperature explains the distances if it leaves at most this share of them.
UNEXPLAINED = 0.1
# For fewer tokens than this, some temperature fits any log-probabilities.
FEWEST_TOKENS = 20
# Two engines that round have the rounded weights in common, so that their errors have at least this correlation.
ROUNDED_ALIKE = 0.3

# How a sampler's distribution may differ from the configured one.
LEFT_OUT = "tokens left out"
TEMPERATURE = "another temperature"


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of some responses' tokens: those that a sampler recorded, and those under checkpoints.

    Args:
        sampled: the sampler's log-probabilities, (tokens,), in nats.
        starts: the place of each response's first token, (responses,), ascending from 0.
        exact: each checkpoint's log-probabilities with weights in float32, (checkpoints, tokens).
        rounded: those with weights in bfloat16, (checkpoints, tokens).
        slopes: how `exact` changes with the logarithm of the inverse temperature, (checkpoints, tokens).
    """

    sampled: numpy.ndarray
    starts: numpy.ndarray
    exact: numpy.ndarray
    rounded: numpy.ndarray
    slopes: numpy.ndarray

    @property
    def lengths(self) -> numpy.ndarray:
        """The number of tokens of each response, (responses,)."""
        return numpy.diff([*self.starts, len(self.sampled)])

    def by_response(self, values: numpy.ndarray) -> numpy.ndarray:
        """Return the means over each response's tokens, (checkpoints, responses), of values (checkpoints, tokens)."""
        return numpy.add.reduceat(values, self.starts, axis=1) / self.lengths


def has_tokens(_: int, tokens: numpy.ndarray) -> bool:
    """Return whether any token is marked: most explanations can be true of any checkpoint and of any tokens."""
    return bool(tokens.any())


@dataclass(frozen=True)
class SamplerExplanation:
    """How a sampler may have got its log-probabilities: a precision, and what shifts them.

    Args:
        precision: the precision of the sampler's weights, one of PRECISIONS.
        distances: by how much sampler and checkpoint differ if the explanation is true, in nats, (checkpoints, tokens).
        limits: what the mean and the 99 % quantile of a checkpoint's distances may be at most, (checkpoints, 2).
        response_limits: what the mean of a response's distances may be at most, (checkpoints, responses).
        shift: LEFT_OUT or TEMPERATURE; None if the sampler's distribution is as configured.
        can_hold: returns whether the explanation can be true of a checkpoint, by its number, and of some tokens, which
            are marked by (tokens,) booleans.
        tried_by_parts: whether it may also explain only some of the responses by each checkpoint.
    """

    precision: str
    distances: numpy.ndarray
    limits: numpy.ndarray
    response_limits: numpy.ndarray
    shift: str | None = None
    can_hold: Callable[[int, numpy.ndarray], bool] = has_tokens
    tried_by_parts: bool = True


@dataclass(frozen=True)
class SamplerJudgement:
    """Which checkpoints the sampler may have answered from.

    Args:
        precision: the precision of the sampler's weights, as far as its log-probabilities show it: one of PRECISIONS,
            or EITHER.
        shift: as for `SamplerExplanation`.
        distances: the distances of the explanation that was taken, (checkpoints, tokens).
        remaining: which checkpoints may have sampled all responses, (checkpoints,) booleans.
        parts: if there is no such checkpoint: from the number of each checkpoint that explains some of the responses to
            which of them it explains, (responses,) booleans. Empty if no checkpoint explains any, or if one remains.
        unexplained: which responses no checkpoint explains, (responses,) booleans; all False if a checkpoint remains.
    """

    precision: str
    shift: str | None
    distances: numpy.ndarray
    remaining: numpy.ndarray
    parts: dict[int, numpy.ndarray]
    unexplained: numpy.ndarray


def judge(scores: Scores, announced: str | None) -> SamplerJudgement:
    """Judge which checkpoints explain the sampler's log-probabilities.

    The first explanation that holds for all responses is taken: float32 as configured, then tokens left out, then
    another temperature, and last bfloat16, if the sampler may have rounded. bfloat16 comes last because its limits are
    wide: a small shift of the distribution would be within them, and so pass for rounding. Under each explanation, a
    single checkpoint is tried before several.

    If no explanation holds for all responses, the one that explains most tokens is taken, the first of equals.

    Args:
        scores: the log-probabilities.
        announced: the sampler's precision by its configuration; None if unknown.
    """
    exact = explain_exact(scores)
    left_out = explain_left_out(scores)
    explanations = [exact, left_out, explain_temperature(scores)]
    if may_round(scores, exact, announced):
        explanations.append(explain_rounded(scores))
    for explanation in explanations:
        remaining = find_remaining(scores, explanation)
        if remaining.any():
            return _conclude(scores, explanation, remaining)
        parts = find_parts(scores, explanation)
        # A single part that explains all responses is a checkpoint that `find_remaining` has just refused.
        if len(parts) > 1 and find_explained(parts, scores).all():
            return _conclude(scores, explanation, remaining, parts)
    none_remaining = numpy.zeros(len(scores.exact), dtype=bool)
    best = exact
    best_parts: dict[int, numpy.ndarray] = {}
    most_tokens = 0
    for explanation in explanations:
        parts = find_parts(scores, explanation)
        explained_tokens = int(scores.lengths[find_explained(parts, scores)].sum())
        if explained_tokens > most_tokens:
            best = explanation
            best_parts = parts
            most_tokens = explained_tokens
    return _conclude(scores, best, none_remaining, best_parts)


def _conclude(
    scores: Scores,
    explanation: SamplerExplanation,
    remaining: numpy.ndarray,
    parts: dict[int, numpy.ndarray] | None = None,
) -> SamplerJudgement:
    """Return the judgement that an explanation is true.

    Args:
        scores: the log-probabilities.
        explanation: the explanation.
        remaining: as for `SamplerJudgement`.
        parts: as for `SamplerJudgement`; None if a checkpoint explains all responses.
    """
    parts = parts or {}
    # A checkpoint that remains explains every response.
    explained = find_explained(parts, scores) | remaining.any()
    precision = explanation.precision
    if explanation.shift == LEFT_OUT:
        explained_by_checkpoint = dict(parts)
        for checkpoint in numpy.flatnonzero(remaining):
            explained_by_checkpoint[int(checkpoint)] = numpy.ones(len(scores.starts), dtype=bool)
        shows_precision = [
            rounding_would_show(scores, checkpoint, responses)
            for checkpoint, responses in explained_by_checkpoint.items()
        ]
        if not any(shows_precision):
            precision = EITHER
    return SamplerJudgement(
        precision=precision,
        shift=explanation.shift,
        distances=explanation.distances,
        remaining=remaining,
        parts=parts,
        unexplained=~explained,
    )


def find_explained(parts: dict[int, numpy.ndarray], scores: Scores) -> numpy.ndarray:
    """Return which responses at least one of the parts explains, (responses,) booleans.

    Args:
        parts: as for `SamplerJudgement`.
        scores: has the number of responses.
    """
    explained = numpy.zeros(len(scores.starts), dtype=bool)
    for explained_by_part in parts.values():
        explained |= explained_by_part
    return explained


def rounding_would_show(scores: Scores, checkpoint: int, responses: numpy.ndarray) -> bool:
    """Return whether rounding would lower some log-probabilities visibly, although tokens left out raise them.

    If it would, a sampler of which `explain_left_out` holds did not round, since its log-probabilities do not fall.

    Args:
        scores: the log-probabilities.
        checkpoint: the number of a checkpoint.
        responses: which responses this checkpoint explains, (responses,) booleans.
    """
    tokens = numpy.repeat(responses, scores.lengths)
    exact = scores.exact[checkpoint, tokens]
    rises = numpy.maximum(scores.sampled[tokens] - exact, 0)
    rounding = numpy.abs(scores.rounded[checkpoint, tokens] - exact)
    # Rounding moves a log-probability up or down with equal chance. If it moves it down, it lowers it by what exceeds
    # the rise.
    expected_falls = numpy.maximum(rounding - rises, 0) / 2
    # Two passes in float32 may differ by MEAN_LIMIT, so that smaller falls show nothing.
    return bool(expected_falls.mean() > MEAN_LIMIT)


def explain_exact(scores: Scores) -> SamplerExplanation:
    """Return the explanation that the sampler used the weights in float32, as configured."""
    checkpoints = len(scores.exact)
    responses = len(scores.starts)
    return SamplerExplanation(
        precision=FLOAT32,
        distances=numpy.abs(scores.exact - scores.sampled),
        limits=numpy.tile(LIMITS, (checkpoints, 1)),
        response_limits=numpy.full((checkpoints, responses), MEAN_LIMIT),
    )


def explain_left_out(scores: Scores) -> SamplerExplanation:
    """Return the explanation that the sampler left tokens out, as top_p and top_k do, unlike its configuration.

    The probabilities of the tokens that it kept are divided by their sum, so that each log-probability rises, by an
    amount that the trace doesn't say. No log-probability should fall. The distances are the falls that occur
    nevertheless, and 0 where a log-probability rises.
    """
    exact = explain_exact(scores)
    difference = scores.sampled - scores.exact
    falls = numpy.maximum(-difference, 0)

    def is_one_sided(checkpoint: int, tokens: numpy.ndarray) -> bool:
        """Return whether log-probabilities rose by far more than they fell."""
        rises = numpy.maximum(difference[checkpoint, tokens], 0).mean()
        return bool(rises > ONE_SIDED * falls[checkpoint, tokens].mean())

    return SamplerExplanation(
        precision=FLOAT32,
        distances=falls,
        limits=exact.limits,
        response_limits=exact.response_limits,
        shift=LEFT_OUT,
        can_hold=is_one_sided,
    )


def explain_temperature(scores: Scores) -> SamplerExplanation:
    """Return the explanation that the sampler's temperature was nearly, but not quite, the configured one.

    The distances are those that remain under the temperature that fits a checkpoint best. They may be at most the share
    UNEXPLAINED of the distances at the configured temperature. The temperature is fitted to all responses, so it can't
    be an explanation by parts.
    """
    difference = scores.sampled - scores.exact
    changes = fit_temperature_changes(scores)
    remaining = numpy.abs(difference - changes[:, None] * scores.slopes)

    def has_enough_tokens(_: int, tokens: numpy.ndarray) -> bool:
        """Return whether there are so many tokens that no temperature explains them by chance."""
        return int(tokens.sum()) >= FEWEST_TOKENS

    return SamplerExplanation(
        precision=FLOAT32,
        distances=remaining,
        limits=UNEXPLAINED * _means_and_quantiles(numpy.abs(difference)),
        # Nothing reads these, since the explanation is not tried by parts.
        response_limits=numpy.zeros((len(scores.exact), len(scores.starts))),
        shift=TEMPERATURE,
        can_hold=has_enough_tokens,
        tried_by_parts=False,
    )


def fit_temperature_changes(scores: Scores) -> numpy.ndarray:
    """Return, for each checkpoint, which change of the logarithm of the inverse temperature fits the responses best.

    Returns:
        (checkpoints,), by least squares; 0 where no token's log-probability changes with the temperature.
    """
    products = (scores.slopes * (scores.sampled - scores.exact)).sum(1)
    squares = (scores.slopes**2).sum(1)
    return numpy.divide(products, squares, out=numpy.zeros(len(squares)), where=squares > 0)


def explain_rounded(scores: Scores) -> SamplerExplanation:
    """Return the explanation that the sampler used the weights in bfloat16, and otherwise sampled as configured.

    The distances of a checkpoint are those to its log-probabilities with rounded weights. If those with exact weights
    are nearer on average, they are taken instead: this happens if the sampler's kernels round in another order. The
    limits are ENGINES_APART times the mean and the quantile of |rounded - exact|, and at least those of float32.
    """
    to_exact = numpy.abs(scores.exact - scores.sampled)
    to_rounded = numpy.abs(scores.rounded - scores.sampled)
    # For each checkpoint, (checkpoints, 1).
    exact_is_nearer = to_exact.mean(1, keepdims=True) <= to_rounded.mean(1, keepdims=True)
    rounding = numpy.abs(scores.rounded - scores.exact)
    return SamplerExplanation(
        precision=BFLOAT16,
        distances=numpy.where(exact_is_nearer, to_exact, to_rounded),
        limits=numpy.maximum(ENGINES_APART * _means_and_quantiles(rounding), LIMITS),
        response_limits=numpy.maximum(ENGINES_APART * scores.by_response(rounding), MEAN_LIMIT),
    )


def may_round(scores: Scores, exact: SamplerExplanation, announced: str | None) -> bool:
    """Return whether the sampler may have rounded its weights.

    It did not round if a response that rounding would change is exact. If the configuration says that it does not
    round, its errors must also correlate with those of rounding, because a small shift of its distribution makes errors
    that are as large.

    Args:
        scores: the log-probabilities.
        exact: from `explain_exact`.
        announced: as for `judge`.
    """
    rounding = scores.rounded - scores.exact
    is_exact = scores.by_response(exact.distances) <= exact.response_limits
    rounding_would_show = scores.by_response(numpy.abs(rounding)) > ROUNDING_SEEN
    if (is_exact & rounding_would_show).any():
        return False
    if announced not in UNROUNDED:
        return True
    errors = scores.sampled - scores.exact
    sizes = numpy.sqrt((errors**2).sum(1) * (rounding**2).sum(1))
    # The correlation for each checkpoint; 0 where there is no error or no rounding.
    correlation = numpy.divide((errors * rounding).sum(1), sizes, out=numpy.zeros(len(sizes)), where=sizes > 0)
    return bool(correlation.max() > ROUNDED_ALIKE)


def find_remaining(scores: Scores, explanation: SamplerExplanation) -> numpy.ndarray:
    """Return for each checkpoint whether all responses may be of it under an explanation, (checkpoints,) booleans.

    Its distances must be within the limits, and must not exceed those of the nearest checkpoint by more than chance
    explains. And there must be no response that it certainly did not sample.
    """
    means_and_quantiles = _means_and_quantiles(explanation.distances)
    within_limits = (means_and_quantiles <= explanation.limits).all(1)
    every_token = numpy.ones(len(scores.sampled), dtype=bool)
    can_hold = [explanation.can_hold(checkpoint, every_token) for checkpoint in range(len(within_limits))]
    fits = within_limits & numpy.array(can_hold)
    if not fits.any():
        return fits
    means = means_and_quantiles[:, 0]
    nearest = numpy.where(fits, means, numpy.inf).argmin()
    # Compared by response, since the tokens of a response are not independent of each other.
    sums_by_response = numpy.add.reduceat(explanation.distances, scores.starts, axis=1)
    is_farther = [_is_above_zero(sums - sums_by_response[nearest]) for sums in sums_by_response]
    is_contradicted = find_contradicted(scores, explanation.distances).any(1)
    return fits & ~numpy.array(is_farther) & ~is_contradicted


def find_contradicted(scores: Scores, distances: numpy.ndarray) -> numpy.ndarray:
    """Return which responses each checkpoint certainly did not sample.

    Another checkpoint is nearer to so many tokens of such a response that chance does not explain it. Chance makes at
    most half of a response's tokens nearer to weights that did not sample them. So the number of tokens that are nearer
    to the other checkpoint, minus the number of those nearer to this one, must exceed SIGN_LIMIT standard deviations.

    Args:
        scores: the log-probabilities.
        distances: between sampler and checkpoint, in nats, (checkpoints, tokens).

    Returns:
        (checkpoints, responses) booleans.
    """
    contradicted = numpy.zeros((len(distances), len(scores.starts)), dtype=bool)
    for checkpoint, own_distances in enumerate(distances):
        # For every other checkpoint and every token: 1 if the other is nearer, -1 if this one is, 0 if neither is.
        signs = numpy.sign(own_distances - distances)
        # For every other checkpoint and every response, (checkpoints, responses).
        excess_of_nearer = numpy.add.reduceat(signs, scores.starts, axis=1)
        # Tokens at equal distances say nothing, so they don't count.
        unequal_tokens = numpy.add.reduceat(numpy.abs(signs), scores.starts, axis=1)
        contradicts = excess_of_nearer > SIGN_LIMIT * numpy.sqrt(unequal_tokens)
        # One other checkpoint that contradicts is enough.
        contradicted[checkpoint] = contradicts.any(axis=0)
    return contradicted


def find_parts(scores: Scores, explanation: SamplerExplanation) -> dict[int, numpy.ndarray]:
    """Return checkpoints that together explain many responses, and which of the responses each of them explains.

    They are chosen one after the other: next comes the checkpoint that explains most of the responses that are left.

    Returns:
        From the number of a checkpoint to (responses,) booleans; empty if the explanation is not tried by parts.
    """
    if not explanation.tried_by_parts:
        return {}
    # Which responses each checkpoint may explain, of those that are left, (checkpoints, responses).
    explains = scores.by_response(explanation.distances) <= explanation.response_limits
    explains &= ~find_contradicted(scores, explanation.distances)
    parts: dict[int, numpy.ndarray] = {}
    while explains.any():
        checkpoint = int(explains.sum(1).argmax())
        responses = explains[checkpoint].copy()
        tokens = numpy.repeat(responses, scores.lengths)
        if explanation.can_hold(checkpoint, tokens):
            parts[checkpoint] = responses
            explains[:, responses] = False
        # Each checkpoint is considered once.
        explains[checkpoint] = False
    return parts


def _means_and_quantiles(distances: numpy.ndarray) -> numpy.ndarray:
    """Return the mean and the 99 % quantile of each checkpoint's distances, (checkpoints, 2)."""
    return numpy.stack([distances.mean(1), numpy.quantile(distances, 0.99, axis=1)], axis=1)


def _is_above_zero(values: numpy.ndarray) -> bool:
    """Return whether values of responses are above 0 on average, by more than chance explains.

    False for fewer than FEWEST_UNITS responses, of which nothing can be told.
    """
    if len(values) < FEWEST_UNITS:
        return False
    interval = percentile_interval(values[resamples(len(values), REPLICATES)].mean(1))
    return interval is not None and interval[0] > 0
