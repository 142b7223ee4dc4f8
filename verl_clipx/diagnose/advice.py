"""What to do about a finding, by what the run's configuration and log say already."""

from collections.abc import Iterable
from typing import Any

from verl_clipx.runs import keys
from verl_clipx.runs.run import Run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LEARNING_RATE = f"{ACTOR}.optim.lr"
OF_VERL = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
BOUNDS = ("clipx.clip_low", "clipx.clip_high", *OF_VERL)
DAPO = 1.28


def settings_of_run(run: Run, names: Iterable[str]) -> dict[str, Any]:
    """Those of some keys that a run's configuration has a number for, with it.

    verl's bounds are left out where a method of the plugin's has bounds of its own.
    """
    values = {name: run.configuration.get(name) for name in names if not (name in OF_VERL and _is_ours(run))}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def more_entropy(run: Run) -> str:
    """Against a collapse of entropy: a higher bound, unless it is that of DAPO or higher, and other methods."""
    high, of_verl = (run.configuration.get(key) for key in ("clipx.clip_high", OF_VERL[1]))
    if not _is_ours(run) and isinstance(of_verl, int | float):
        high = 1 + of_verl
    first = "Raise the upper bound (+clipx=dapo)"
    if isinstance(high, int | float) and high >= DAPO:
        first = f"The upper bound is {high:g} already; raise it further"
    others = ", ".join(f"+clipx={name}" for name in ("acpo", "cispo") if name != run.method)
    return f"{first}, or take a method that keeps improbable tokens ({others})."


def other_prompts(run: Run) -> str:
    """Where prompts' samples score alike: harder or easier ones, if the log says which of them are solved."""
    alike, solved = run.values(keys.ALIKE), run.values(keys.SOLVED)
    if solved.empty:
        return "Take easier or harder prompts, more samples a prompt, or filter groups."
    if solved.iloc[-1] > alike.iloc[-1] / 2:
        return "Most of them are solved: take harder prompts, or filter groups."
    return "Most of them are not solved: take easier prompts, more samples a prompt, or filter groups."


def _is_ours(run: Run) -> bool:
    return run.configuration.get("clipx.method", "observe") != "observe"
