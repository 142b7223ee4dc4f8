"""The judgement on a sampler, of made-up log-probabilities of two checkpoints. Not covered: what checkpoints and
samplers compute, and the command (test_recompute.py).
"""

import numpy
import pytest

from verl_clipx.analysis.recompute.sampler import EITHER, FLOAT32, LEFT_OUT, Scores, judge

TOKENS = 40
# The log-probabilities of every other token go up, and those of the others go down.
SIGNS = numpy.tile([1.0, -1.0], TOKENS // 2)
ROUNDING = 0.01
# By how much tokens left out raise the others' log-probabilities: far more than rounding lowers some, and far less.
HIGH_RISE = 1.0
LOW_RISE = 0.002


def score_sampler(checkpoints: list[int], rise: float, *, rounds: bool) -> Scores:
    """Return the log-probabilities of a sampler that leaves tokens out.

    Args:
        checkpoints: the checkpoint that samples each response, 0 or 1.
        rise: by how much the tokens left out raise the log-probabilities.
        rounds: whether the sampler rounds its weights to bfloat16.
    """
    signs = numpy.tile(SIGNS, len(checkpoints))
    exact = numpy.stack([-5.0 + 0.0 * signs, -5.0 + 3.0 * signs])
    rounded = exact + ROUNDING * signs
    of_sampler = rounded if rounds else exact
    token_checkpoints = numpy.repeat(checkpoints, TOKENS)
    return Scores(
        sampled=of_sampler[token_checkpoints, numpy.arange(len(signs))] + rise,
        starts=numpy.arange(len(checkpoints)) * TOKENS,
        exact=exact,
        rounded=rounded,
        slopes=0.001 * numpy.stack([signs, signs]),
    )


@pytest.mark.parametrize("checkpoints", [[0], [1], [0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize(
    ("rise", "rounds", "precision"),
    [
        pytest.param(HIGH_RISE, True, EITHER, id="hidden rounding"),
        pytest.param(HIGH_RISE, False, EITHER, id="no rounding, which would be hidden"),
        pytest.param(LOW_RISE, False, FLOAT32, id="no rounding, which would show"),
    ],
)
def test_tokens_left_out_leave_the_precision_open_if_they_hide_rounding(checkpoints, rise, rounds, precision):
    judgement = judge(score_sampler(checkpoints, rise, rounds=rounds), announced=None)
    assert judgement.shift == LEFT_OUT
    assert not judgement.unexplained.any()
    assert judgement.precision == precision
