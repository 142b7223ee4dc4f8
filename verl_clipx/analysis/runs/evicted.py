"""How many prompts verl dropped for their age, by a run's log."""

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.trainer import FULLY_ASYNC, OLDER, ONE_STEP_OFF, SYNC

# Trainers that train on whatever they sampled.
DROP_NONE = (OLDER, SYNC, ONE_STEP_OFF)


def evicted_by_step(run: Run) -> pandas.Series:
    """Return how many prompts were dropped, by training step; verl doesn't log a 0."""
    steps = run.log.index[run.log.index > 0]
    return run.values(keys.EVICTED).reindex(steps, fill_value=0.0)


def evicted_share(run: Run) -> float | None:
    """Return which share of a run's prompts was dropped; None if its log or configuration does not say."""
    kind = run.record.trainer.kind
    if kind in DROP_NONE and keys.EVICTED not in run.log:
        return 0.0
    # verl's fully asynchronous trainer counts in another way. A log with neither metric has none of the replay buffer.
    known = keys.EVICTED in run.log or keys.STALENESS in run.log
    evicted = evicted_by_step(run)
    prompts = run.record.batch.prompts
    if kind in (None, FULLY_ASYNC) or not known or not prompts or evicted.empty:
        return None
    return float(evicted.sum() / (evicted.sum() + prompts * len(evicted)))
