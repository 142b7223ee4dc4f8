"""Judges from log-probabilities which weights a sampler answered from, at which precision, and what shifted them.

A function here takes arrays of numbers alone: what a sampler recorded of its tokens, and what checkpoints give them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from verl_clipx.common.statistics.bootstrap import FEWEST_UNITS, percentile_interval, resamples

PRECISIONS = ("float32", "bfloat16")
# Where leaving tokens out raises log-probabilities by more than rounding changes them.
EITHER = "float32 or bfloat16"
UNROUNDED = ("float32", "fp32", "float64")
# Two passes in float32 differ by less, in nats: on average, and for 99 % of the tokens.
LIMITS = numpy.array([1e-4, 1e-3])
# Two engines round apart by √2 of what rounding to bfloat16 does to these tokens.
ENGINES_APART = 2.0
REPLICATES = 200
# What rounding does on average, in nats, to a response that can't be exact by chance where the sampler rounds.
ROUNDING_SEEN = 10 * LIMITS[0]
# A response is of other weights if more of its tokens are nearer to these than √tokens times half of this explains.
SIGN_LIMIT = 5.0
# Leaving tokens out raises the others' log-probabilities: the rises are this many times as large as the falls.
ONE_SIDED = 10.0
# Another temperature leaves less than this share of the distances unexplained.
UNEXPLAINED = 0.1
# With fewer tokens a temperature can be found that explains anything.
FEWEST_TOKENS = 20
# Two engines have the rounded weights in common, so that their errors agree in part.
ROUNDED_ALIKE = 0.3

LEFT_OUT = "tokens left out"
TEMPERATURE = "another temperature"


@dataclass(frozen=True)
class Scores:
    """What a sampler recorded of some responses' tokens, and what checkpoints give these.

    Args:
        sampled: the sampler's log-probabilities, (tokens,), in nats.
        starts: the first token of each response, (responses,), ascending from 0.
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
        """Returns the mean of (checkpoints, tokens) over each response's tokens, (checkpoints, responses)."""
        return numpy.add.reduceat(values, self.starts, axis=1) / self.lengths


def has_tokens(_: int, tokens: numpy.ndarray) -> bool:
    """Returns whether any token is chosen, which is all that most explanations need."""
    return bool(tokens.any())


@dataclass(frozen=True)
class Explanation:
    """How a sampler may have got its log-probabilities: a precision, and what shifts them.

    Args:
        precision: of the weights, from PRECISIONS.
        distances: what then remains between sampler and checkpoint, in nats, (checkpoints, tokens).
        limits: what the mean and the 99 % quantile of a checkpoint's distances may be, (checkpoints, 2).
        response_limits: what the mean of a response's distances may be, (checkpoints, responses).
        shift: LEFT_OUT or TEMPERATURE; None: the sampler's distribution is as configured.
        holds: whether it can hold of the tokens, for a checkpoint and a choice of tokens.
        parts: whether the responses may be of several checkpoints.
    """

    precision: str
    distances: numpy.ndarray
    limits: numpy.ndarray
    response_limits: numpy.ndarray
    shift: str | None = None
    holds: Callable[[int, numpy.ndarray], bool] = has_tokens
    parts: bool = True


@dataclass(frozen=True)
class Judgement:
    """Which checkpoints the sampler may have answered from.

    Args:
        precision: of the sampler, as far as its log-probabilities show it: from PRECISIONS, or EITHER.
        shift: as for `Explanation`.
        distances: the sizes of what remains between sampler and checkpoint, (checkpoints, tokens).
        remains: whether all responses may be of a checkpoint, (checkpoints,).
        parts: for several checkpoints that explain the responses together, which each explains: (responses,) booleans.
        unexplained: whether none of the checkpoints explains a response, (responses,); all False if one remains.
    """

    precision: str
    shift: str | None
    distances: numpy.ndarray
    remains: numpy.ndarray
    parts: dict[int, numpy.ndarray]
    unexplained: numpy.ndarray


def judge(scores: Scores, announced: str | None) -> Judgement:
    """Judges which checkpoints explain the sampler's log-probabilities.

    One checkpoint at full precision explains them best, then several, then a shift of the sampler's distribution, and
    rounding last: a shift is smaller than what rounding may do, and must not pass for it.

    Args:
        announced: the sampler's precision by its configuration, None if unknown.
    """
    exact = explain_exact(scores)
    left_out = explain_left_out(scores)
    explanations = [exact, left_out, explain_temperature(scores)]
    if may_round(scores, exact, announced):
        explanations.append(explain_rounded(scores))
    for explanation in explanations:
        remains = find_remaining(scores, explanation)
        if remains.any():
            return _judgement(scores, explanation, remains)
        parts = find_parts(scores, explanation)
        if len(parts) > 1 and explained_by(parts, scores).all():
            return _judgement(scores, explanation, remains, parts)
    # None explains all of the responses: the one that explains most tokens.
    partial = [(explanation, find_parts(scores, explanation)) for explanation in explanations]
    explained = [int(scores.lengths[explained_by(parts, scores)].sum()) for _, parts in partial]
    explanation, parts = partial[int(numpy.argmax(explained))]
    if not parts:
        explanation = exact
    return _judgement(scores, explanation, numpy.zeros(len(scores.exact), dtype=bool), parts)


def _judgement(
    scores: Scores,
    explanation: Explanation,
    remains: numpy.ndarray,
    parts: dict[int, numpy.ndarray] | None = None,
) -> Judgement:
    parts = parts or {}
    explained = explained_by(parts, scores) | remains.any()
    precision = explanation.precision
    explaining = [*numpy.flatnonzero(remains), *parts]
    if explanation.shift == LEFT_OUT and not any(shows_no_rounding(scores, index) for index in explaining):
        precision = EITHER
    return Judgement(
        precision=precision,
        shift=explanation.shift,
        distances=explanation.distances,
        remains=remains,
        parts=parts,
        unexplained=~explained,
    )


def explained_by(parts: dict[int, numpy.ndarray], scores: Scores) -> numpy.ndarray:
    """Returns whether one of the parts explains a response, (responses,)."""
    explained = numpy.zeros(len(scores.starts), dtype=bool)
    for responses in parts.values():
        explained |= responses
    return explained


def shows_no_rounding(scores: Scores, checkpoint: int) -> bool:
    """Returns whether log-probabilities that are raised would also fall, to be seen, if the sampler rounded."""
    rises = numpy.maximum(scores.sampled - scores.exact[checkpoint], 0)
    rounding = numpy.abs(scores.rounded[checkpoint] - scores.exact[checkpoint])
    # Rounding lowers half of them.
    return bool(numpy.maximum(rounding - rises, 0).mean() / 2 > LIMITS[0])


def explain_exact(scores: Scores) -> Explanation:
    """Returns the explanation that the sampler used the weights in float32, as configured."""
    checkpoints = len(scores.exact)
    responses = len(scores.starts)
    return Explanation(
        precision=PRECISIONS[0],
        distances=numpy.abs(scores.exact - scores.sampled),
        limits=numpy.tile(LIMITS, (checkpoints, 1)),
        response_limits=numpy.full((checkpoints, responses), LIMITS[0]),
    )


def explain_left_out(scores: Scores) -> Explanation:
    """Returns the explanation that the sampler left tokens out, as top_p and top_k do, unlike its configuration.

    The others' probabilities are divided by their sum, so that each log-probability rises by what the trace doesn't
    say. None falls, and what falls is the distance.
    """
    exact = explain_exact(scores)
    difference = scores.sampled - scores.exact
    falls = numpy.maximum(-difference, 0)

    def is_one_sided(checkpoint: int, tokens: numpy.ndarray) -> bool:
        rises = numpy.maximum(difference[checkpoint, tokens], 0).mean()
        return bool(rises > ONE_SIDED * falls[checkpoint, tokens].mean())

    return Explanation(
        precision=PRECISIONS[0],
        distances=falls,
        limits=exact.limits,
        response_limits=exact.response_limits,
        shift=LEFT_OUT,
        holds=is_one_sided,
    )


def explain_temperature(scores: Scores) -> Explanation:
    """Returns the explanation that the sampler's temperature was nearly, but not quite, the configured one."""
    difference = scores.sampled - scores.exact
    changes = temperature_changes(scores)
    remaining = numpy.abs(difference - changes[:, None] * scores.slopes)

    def has_enough_tokens(_: int, tokens: numpy.ndarray) -> bool:
        return int(tokens.sum()) >= FEWEST_TOKENS

    return Explanation(
        precision=PRECISIONS[0],
        distances=remaining,
        limits=UNEXPLAINED * _sizes(numpy.abs(difference)),
        response_limits=numpy.zeros((len(scores.exact), len(scores.starts))),
        shift=TEMPERATURE,
        holds=has_enough_tokens,
        parts=False,
    )


def temperature_changes(scores: Scores) -> numpy.ndarray:
    """Returns by how much the logarithm of the inverse temperature differs, by least squares, (checkpoints,)."""
    products = (scores.slopes * (scores.sampled - scores.exact)).sum(1)
    squares = (scores.slopes**2).sum(1)
    return numpy.divide(products, squares, out=numpy.zeros(len(squares)), where=squares > 0)


def explain_rounded(scores: Scores) -> Explanation:
    """Returns the explanation that the sampler used the weights in bfloat16, and is else as configured."""
    apart = numpy.abs(scores.exact - scores.sampled)
    nearer = numpy.abs(scores.rounded - scores.sampled)
    # A sampler whose kernels round in another order is nearer to what is not rounded.
    nearer = numpy.where(apart.mean(1, keepdims=True) <= nearer.mean(1, keepdims=True), apart, nearer)
    rounding = numpy.abs(scores.rounded - scores.exact)
    return Explanation(
        precision=PRECISIONS[1],
        distances=nearer,
        limits=numpy.maximum(ENGINES_APART * _sizes(rounding), LIMITS),
        response_limits=numpy.maximum(ENGINES_APART * scores.by_response(rounding), LIMITS[0]),
    )


def may_round(scores: Scores, exact: Explanation, announced: str | None) -> bool:
    """Returns whether the sampler may have rounded its weights.

    Not if responses that rounding changes are exact. Where the configuration says that it does not round, its errors
    must also agree with those of rounding: a small shift of its distribution is as large.
    """
    rounding = scores.rounded - scores.exact
    is_exact = scores.by_response(exact.distances) <= exact.response_limits
    is_seen = scores.by_response(numpy.abs(rounding)) > ROUNDING_SEEN
    if (is_exact & is_seen).any():
        return False
    if announced not in UNROUNDED:
        return True
    errors = scores.sampled - scores.exact
    sizes = numpy.sqrt((errors**2).sum(1) * (rounding**2).sum(1))
    agreement = numpy.divide((errors * rounding).sum(1), sizes, out=numpy.zeros(len(sizes)), where=sizes > 0)
    return bool(agreement.max() > ROUNDED_ALIKE)


def find_remaining(scores: Scores, explanation: Explanation) -> numpy.ndarray:
    """Returns whether all responses may be of a checkpoint, (checkpoints,): none is elsewhere for sure, and their
    distances are within the limits and no farther than the nearest checkpoint's by more than chance explains.
    """
    sizes = _sizes(explanation.distances)
    within = (sizes <= explanation.limits).all(1)
    every_token = numpy.ones(len(scores.sampled), dtype=bool)
    within &= [explanation.holds(checkpoint, every_token) for checkpoint in range(len(within))]
    if not within.any():
        return within
    nearest = numpy.where(within, sizes[:, 0], numpy.inf).argmin()
    # By response, since its tokens are not independent of each other.
    of_responses = numpy.add.reduceat(explanation.distances, scores.starts, axis=1)
    farther = [_exceeds(values - of_responses[nearest]) for values in of_responses]
    elsewhere = find_contradicted(scores, explanation.distances).any(1)
    return within & ~numpy.array(farther) & ~elsewhere


def find_contradicted(scores: Scores, distances: numpy.ndarray) -> numpy.ndarray:
    """Returns whether a response's tokens are nearer to another checkpoint, in more of them than chance explains.

    Chance makes at most half of the tokens nearer to weights that did not sample them.

    Args:
        distances: (checkpoints, tokens).

    Returns:
        (checkpoints, responses) booleans.
    """
    contradicted = numpy.zeros((len(distances), len(scores.starts)), dtype=bool)
    for checkpoint, own in enumerate(distances):
        signs = numpy.sign(own - distances)
        surplus = numpy.add.reduceat(signs, scores.starts, axis=1)
        unequal = numpy.add.reduceat(numpy.abs(signs), scores.starts, axis=1)
        contradicted[checkpoint] = (surplus > SIGN_LIMIT * numpy.sqrt(unequal)).any(0)
    return contradicted


def find_parts(scores: Scores, explanation: Explanation) -> dict[int, numpy.ndarray]:
    """Returns the fewest checkpoints that explain the most responses, and which of them each explains.

    A response that several explain counts for the one that explains most.
    """
    if not explanation.parts:
        return {}
    may = scores.by_response(explanation.distances) <= explanation.response_limits
    may &= ~find_contradicted(scores, explanation.distances)
    parts: dict[int, numpy.ndarray] = {}
    while may.any():
        checkpoint = int(may.sum(1).argmax())
        responses = may[checkpoint].copy()
        if explanation.holds(checkpoint, numpy.repeat(responses, scores.lengths)):
            parts[checkpoint] = responses
            may[:, responses] = False
        may[checkpoint] = False
    return parts


def _sizes(distances: numpy.ndarray) -> numpy.ndarray:
    """Returns the mean of each checkpoint's distances, and what 99 % of them don't exceed, (checkpoints, 2)."""
    return numpy.stack([distances.mean(1), numpy.quantile(distances, 0.99, axis=1)], axis=1)


def _exceeds(values: Sequence[float]) -> bool:
    """Returns whether responses' values are above 0 on average by more than chance; not with too few of them."""
    values = numpy.asarray(values)
    if len(values) < FEWEST_UNITS:
        return False
    interval = percentile_interval(values[resamples(len(values), REPLICATES)].mean(1))
    return interval is not None and interval[0] > 0
