"""Whether one run is better than another on the same questions."""

from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 10_000

# Resamples drawn at once: bounds the memory at about 8 bytes x this x questions.
_CHUNK = 500


@dataclass(frozen=True)
class Comparison:
    """Difference of two runs, second minus first.

    Args:
        first, second: each run's mean over questions.
        difference: mean over questions of the difference.
        low, high: ends of the 95 % percentile interval of the paired bootstrap.
        p_value: two-sided, from the share of resamples on the other side of 0; at least 2 / (resamples + 1), and 1 for
            a single question, whose resamples are all the same.
        wins, losses, ties: questions on which the second run is better, worse, equal.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    wins: int
    losses: int
    ties: int

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return asdict(self)


def paired_bootstrap(first: np.ndarray, second: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES) -> Comparison:
    """Compare two runs by resampling questions, each with the values of both runs.

    The pairs keep what a question's difficulty does to both runs out of the interval. Source: Efron and Tibshirani,
    An Introduction to the Bootstrap, 13.3 (percentile interval) and 15.4.

    Args:
        first: ``[questions]``, a value a question, for instance avg@k.
        second: ``[questions]``, the other run's value on the same questions.
        seed: seed of the resampling.
        resamples: how many.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"a value a question is needed of both runs, got shapes {first.shape} and {second.shape}")
    differences = second - first
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            differences[
                generator.integers(len(differences), size=(min(_CHUNK, resamples - done), len(differences)))
            ].mean(axis=1)
            for done in range(0, resamples, _CHUNK)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    one_sided = (1 + min((means <= 0).sum(), (means >= 0).sum())) / (resamples + 1)
    return Comparison(
        first=float(first.mean()),
        second=float(second.mean()),
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
        p_value=float(min(1.0, 2 * one_sided)) if len(differences) > 1 else 1.0,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )
