"""What to do about a finding, by what the run's configuration and log say already."""

import re
from collections.abc import Callable

from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

DAPO = 1.28


def with_values(run: Run, remedy: str | Callable[[Run], str]) -> str:
    """A remedy in which each key of the configuration has its value in this run behind it, if that is a number.

    Keys below `actor_rollout_ref` may leave that out.
    """

    def with_value(key: re.Match) -> str:
        values = (run.configuration.get(name) for name in (key[0], f"actor_rollout_ref.{key[0]}"))
        value = next((value for value in values if isinstance(value, int | float)), None)
        return key[0] if value is None else f"{key[0]} (here {value})"

    return re.sub(r"\b[a-z_]+(\.[a-z_]+)+\b", with_value, remedy if isinstance(remedy, str) else remedy(run))


def after_skipped(run: Run) -> str:
    """What an update with a gradient that is not finite has left, by the run's engine."""
    kept = "the policy stayed as it was, so that clipping and bounds do not show how the method trains"
    broken = "verl's Megatron engine took the step, and the weights may not be finite since: resume from before it"
    first = {"skipped": kept, "taken": broken}.get(run.fate_of_skipped, f"If skipped, {kept}; otherwise {broken}")
    named = "The run's output names rank, fields and prompts of values that are not finite."
    return f"{first[0].upper()}{first[1:]}. {named}"


def more_entropy(run: Run) -> str:
    """Against a collapse of entropy: a higher bound, unless it is DAPO's or higher, and other methods."""
    ours = run.configuration.get("clipx.method", "observe") != "observe"
    bound = run.configuration.get("clipx.clip_high" if ours else "actor_rollout_ref.actor.clip_ratio_high")
    high = bound + (not ours) if isinstance(bound, int | float) else 0.0
    first = f"The upper bound is {high:g} already; raise it" if high >= DAPO else "Raise the upper bound (+clipx=dapo)"
    others = ", ".join(f"+clipx={name}" for name in ("acpo", "cispo") if name != run.method)
    return f"{first}, or take a method that keeps improbable tokens ({others})."


def other_prompts(run: Run) -> str:
    """Where samples score alike: harder or easier prompts, if the log says what they score."""
    mean, low, high = (run.values(key) for key in (keys.REWARD, keys.LOWEST_REWARD, keys.HIGHEST_REWARD))
    if mean.empty or not low.min() < high.max():
        return "Take easier or harder prompts, more samples a prompt, or filter groups."
    score = f"with a mean score of {mean.iloc[-1]:.3g} between {low.min():g} and {high.max():g}"
    if mean.iloc[-1] > (low.min() + high.max()) / 2:
        return f"Most of them are solved, {score}: take harder prompts, or filter groups."
    return f"Most of them are not solved, {score}: take easier prompts, more samples a prompt, or filter groups."


def less_entropy(run: Run) -> str:
    """Against an explosion of entropy: no bonus on it, a lower bound, a lower learning rate."""
    bonus = run.configuration.get("actor_rollout_ref.actor.entropy_coeff")
    first = "Set actor.entropy_coeff to 0, lower" if bonus != 0 else "Lower"
    return f"{first} actor.optim.lr or the upper bound, and go back to a checkpoint before."


def some_signal(run: Run) -> str:
    """Where no advantage differs from 0: what the scores say of it."""
    low, high = run.values(keys.LOWEST_REWARD), run.values(keys.HIGHEST_REWARD)
    what = "Whatever a prompt's samples answer scores the same, so nothing is learned."
    if len(low) and low.iloc[-1] == high.iloc[-1]:
        what = f"All samples score {low.iloc[-1]:g}, so nothing is learned."
    return f"{what} Look whether the reward function reads the answers as it should; if it does: {other_prompts(run)}"
