"""The question whether both arms trained on as much of what was sampled for them."""

from statistics import mean

from verl_clipx.analysis.certify.arms import Arms, Found, decided, question
from verl_clipx.analysis.runs.evicted import evicted_share
from verl_clipx.common.sentences import percent

# Shares of dropped prompts that differ by less are alike: how many are late differs from run to run.
ALIKE = 0.05


@question("as many prompts were dropped for their age", "the configuration", lambda run: run.configuration)
def dropped_alike(arms: Arms) -> Found:
    """Were as many prompts dropped for their age in both arms? The oldest have the longest answers."""
    shares = {run.name: evicted_share(run) for run in arms.runs}
    unknown = [f"dropped prompts in {name}" for name, share in shares.items() if share is None]
    if unknown:
        return decided([], "", unknown)
    first, second = (mean(shares[run.name] for run in arm) for arm in arms.both)
    found = f"{percent(first)} and {percent(second)} of the prompts"
    wrong = [f"{found}, so that the arms did not train on the same data"] if abs(first - second) > ALIKE else []
    return decided(wrong, found)
