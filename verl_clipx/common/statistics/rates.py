"""The exact comparison of two rates of counted events."""


def chance_of_as_many(count: float, trials: float, other_count: float, other_trials: float) -> float:
    """Returns the probability of at least so many events at another sample's rate: the exact conditional test.

    If the rates are equal, each event of both samples is in the first one with a probability of that sample's share of
    all trials.

    Args:
        count, trials: events and trials of the first sample. Counts of events are rounded to whole numbers.
        other_count, other_trials: those of the other sample.
    """
    # Imported here, because a training imports this module, and verl does not bring scipy.
    from scipy.stats import binom

    events = round(count)
    if not events or not trials:
        return 1.0
    return float(binom.sf(events - 1, events + round(other_count), trials / (trials + other_trials)))
