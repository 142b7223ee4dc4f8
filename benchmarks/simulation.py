"""Made-up evaluations and logs of methods whose true difference is known, to see what a verdict is worth."""

from dataclasses import dataclass

import numpy as np

_MANY = 2_000_000


@dataclass(frozen=True)
class World:
    """Where scores come from. Effects are normal, in units of the log-odds of a right sample.

    Args:
        difficulty: Beta distribution of a question's chance to be answered: below 1, most are easy or hard, as in
            mathematics.
        effect: how much better the second method is on every question.
        method: standard deviation over questions of what the second method does beyond `effect`.
        seeds: standard deviation over trainings, of each method.
        interaction: standard deviation over trainings and questions beyond that.
        cluster_size: mean number of questions that share a source; above 1 the sizes differ, geometrically distributed.
        shared: share of the variance of `method` and `interaction` that a source's questions have in common.
    """

    difficulty: tuple[float, float] = (0.6, 0.6)
    effect: float = 0.2
    method: float = 0.3
    seeds: tuple[float, float] = (0.1, 0.1)
    interaction: float = 0.3
    cluster_size: float = 1.0
    shared: float = 0.0

    def draw(
        self, seeds: tuple[int, int], questions: int, samples: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One experiment.

        Returns:
            Shares of right samples ``[seeds, questions]`` of either method, and the questions' source ``[questions]``.
        """
        breaks = generator.random(questions) < 1 / self.cluster_size
        sources = np.cumsum(breaks)
        odds = _log_odds(generator.beta(*self.difficulty, questions))
        shift = self.effect + self.method * self._normal((1, questions), sources, generator)
        found = []
        for count, between, more in zip(seeds, self.seeds, (0.0, shift), strict=True):
            training = between * generator.standard_normal((count, 1))
            own = self.interaction * self._normal((count, questions), sources, generator)
            chance = 1 / (1 + np.exp(-(odds + more + training + own)))
            found.append(generator.binomial(samples, chance) / samples)
        return found[0], found[1], sources

    def _normal(self, shape: tuple[int, int], sources: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        own = generator.standard_normal(shape)
        if not self.shared:
            return own
        common = generator.standard_normal((shape[0], sources.max() + 1))[:, sources]
        return np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own

    def true_difference(self) -> float:
        """The methods' expected difference, from two million draws: exact to about 0.0003."""
        generator = np.random.default_rng(0)
        odds = _log_odds(generator.beta(*self.difficulty, _MANY))
        noise = generator.standard_normal((2, _MANY))
        spread = np.sqrt(np.array(self.seeds) ** 2 + self.interaction**2)
        second = odds + self.effect + self.method * noise[0] + spread[1] * noise[1]
        first = odds + spread[0] * noise[1]
        return float((1 / (1 + np.exp(-second)) - 1 / (1 + np.exp(-first))).mean())


def _log_odds(chance: np.ndarray) -> np.ndarray:
    chance = np.clip(chance, 1e-9, 1 - 1e-9)
    return np.log(chance / (1 - chance))


def lasting_offsets(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Rewards of a setting's trainings ``[seeds, steps]`` that differ by 2 points throughout, with 5 a step."""
    return 0.5 + 0.02 * generator.standard_normal((seeds, 1)) + 0.05 * generator.standard_normal((seeds, steps))


def walks(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """The same of trainings that wander, 1 point a step: what a step gains or loses stays."""
    return lasting_offsets(seeds, steps, generator) + 0.01 * generator.standard_normal((seeds, steps)).cumsum(axis=1)


def drifts(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """The same of trainings that learn at different speeds: by 30 points over the run, more or less by 10."""
    speed = 0.3 + 0.1 * generator.standard_normal((seeds, 1))
    return lasting_offsets(seeds, steps, generator) + speed * np.linspace(0, 1, steps)


def collapses(seeds: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """The same of trainings of which a fifth lose nearly everything at some step."""
    after = np.arange(steps) >= generator.integers(steps, size=(seeds, 1))
    fell = after & (generator.random((seeds, 1)) < 0.2)
    return np.where(fell, 0.02, 1.0) * lasting_offsets(seeds, steps, generator)


def one_sided_collapse(seeds: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two methods' trainings that differ by 2 points, of the second a fifth 30 points lower."""
    first, second = 0.5 + 0.02 * generator.standard_normal((2, seeds))
    return first, second - 0.3 * (generator.random(seeds) < 0.2)


def validations(
    count: int, problems: int, fall: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Training rewards that rise, and validations that rise to 60 % and fall by so much over the second half.

    Chance is of the samples, over so many problems, and of the training: half a point a validation, which stays.
    """
    part = np.arange(count) / (count - 1)
    walk = 0.005 * generator.standard_normal(count).cumsum()
    chance = 0.3 + 0.3 * (1 - np.exp(-8 * part)) - fall * np.clip(2 * part - 1, 0, 1) + walk
    rewards = 0.3 + 0.4 * part + 0.02 * generator.standard_normal(count)
    return rewards, generator.binomial(problems, np.clip(chance, 0, 1)) / problems


LOGS = {"lasting offsets": lasting_offsets, "walks": walks, "drifts": drifts, "collapses of a fifth": collapses}
"""Ways in which trainings of one setting differ, each a function of seeds, steps and generator."""
