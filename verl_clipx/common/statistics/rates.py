"""The exact comparison of two rates of counted events."""


def chance_of_as_many(count: float, trials: float, other_count: float, other_trials: float) -> float:
    """Return how probable it is that a sample has at least `count` events if its rate is that of another sample.

    This is the p-value of the exact conditional test. If the rates are equal, each event of both samples is in the
    first sample with a probability of that sample's share of all trials.

    Args:
        count, trials: how many events and trials the sample has. Counts of events are rounded to whole numbers.
        other_count, other_trials: how many the other sample has.
    """
    # Imported here, because a training imports this module, and scipy does not come with verl.
    from scipy.stats import binom

    events = round(count)
    if not events or not trials:
        return 1.0
    return float(binom.sf(events - 1, events + round(other_count), trials / (trials + other_trials)))
