"""The exact comparison of two rates of counted events."""

from scipy.stats import binom


def chance_of_as_many(count: float, of: float, other_count: float, other_of: float) -> float:
    """Returns the probability of at least so many events at another sample's rate: the exact conditional test.

    Of all events in both samples, as many are in the first as its share of the trials, if the rates are equal.

    Args:
        count, other_count: events in the two samples, which are rounded to whole numbers.
        of, other_of: trials.
    """
    events = round(count)
    if not events or not of:
        return 1.0
    return float(binom.sf(events - 1, events + round(other_count), of / (of + other_of)))
