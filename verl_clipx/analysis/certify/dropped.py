"""The question whether both arms trained on as much of what was sampled for them."""

from statistics import mean

from verl_clipx.analysis.certify.arms import Arms, Outcome, decided, question
from verl_clipx.analysis.runs.evicted import evicted_share
from verl_clipx.common.sentences import percent

# Two shares of dropped prompts are alike if they differ by no more than this: the number of late prompts varies from
# run to run.
ALIKE = 0.05


@question("as many prompts were dropped for their age", needs="the configuration", has=lambda run: run.configuration)
def dropped_alike(arms: Arms) -> Outcome:
    """Were as many prompts dropped for their age in both arms? The oldest have the longest answers."""
    unknown = [f"dropped prompts in {run.name}" for run in arms.runs if evicted_share(run) is None]
    if unknown:
        return decided(wrong=[], right="", unknown=unknown)
    first = mean(evicted_share(run) for run in arms.first)
    second = mean(evicted_share(run) for run in arms.second)
    dropped = f"{percent(first)} and {percent(second)} of the prompts"
    wrong = []
    if abs(first - second) > ALIKE:
        wrong.append(f"{dropped}, so that the arms did not train on the same data")
    return decided(wrong, right=dropped)
