"""`clipx replay`: reads the run, applies each setting, and prints what each would do."""

from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape

from verl_clipx.base.method import NODE
from verl_clipx.common.listed import print_list
from verl_clipx.common.terminal import TerminalConsole
from verl_clipx.replay.measures import Replay, of_run, replay
from verl_clipx.replay.output import (
    HEADINGS,
    MEANINGS,
    OUTSIDE,
    UNKNOWN,
    as_json,
    changes_of,
    heading_of,
    keeps_outside,
    row_of,
)
from verl_clipx.replay.sampler import HEADINGS as OF_SAMPLER
from verl_clipx.replay.sampler import MEANINGS as OF_RATIOS
from verl_clipx.replay.sampler import cells_of, sampler_by
from verl_clipx.replay.tokens import TracedTokens, traced_step
from verl_clipx.run.candidates import candidates_of
from verl_clipx.run.config import Settings, build
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run
from verl_clipx.runs.sameness import nested

# Keys of the node that do not change the loss on given tokens.
NOT_OF_THE_LOSS = ("trace", "update")


class ReplayedRun(NamedTuple):
    """A run's step: its updates with their tokens, what the run itself did, and what each setting would have done."""

    run: Run
    updates: list[TracedTokens]
    of_run: Replay
    settings: list[Replay]


def replay_run(path: Path, words: list[str], *, step: int | None = None) -> ReplayedRun:
    """Replays settings on a run.

    Args:
        words: as for `candidates_of`; without any, the run's own setting.
        step: as for `traced_step`.

    Raises:
        OSError, ValueError: the run has no traces that can be replayed, or a setting is wrong; the message says which.
    """
    candidates = candidates_of(words)
    run = read_run(path)
    updates = traced_step(run, step)
    if not updates:
        raise ValueError(
            f"{run.traces}: no update of this step has tokens with finite numbers; name another by --step."
        )
    own = own_settings(run)
    if not candidates and own is None:
        raise ValueError(f"name what to replay, for example +{NODE}=acpo {NODE}.alpha=1,2.")
    settings = [one for candidate in candidates for one in candidate.each()]
    settings = settings or [(f"{own.method.name}, as trained", own)]
    replays = [replay(label, of_label, own, updates) for label, of_label in settings]
    return ReplayedRun(run, updates, of_run(updates), replays)


def content_of(replayed: ReplayedRun, tokens: int) -> dict[str, Any]:
    """All numbers of a replay, for JSON, with so many changed tokens of each setting."""
    return {
        "run": replayed.run.name,
        "step": replayed.updates[0].step,
        "exact": replayed.of_run.exact,
        "of_run": as_json(replayed.of_run, 0),
        "settings": [as_json(one, tokens) for one in replayed.settings],
        **{f"sampler_by_{group}": _sampler_by(replayed, group) for group in ("age", "turn")},
        "unknown": UNKNOWN,
    }


def print_replayed(console: TerminalConsole, replayed: ReplayedRun) -> None:
    """Prints a replay: lists, then how near the run's own setting comes, and what is unknown."""
    replays = [replayed.of_run, *replayed.settings]
    estimates = "estimates, [95 % interval over prompts] where each update has five prompts"
    notes = [MEANINGS, *[OUTSIDE] * any(keeps_outside(one, side) for one in replays for side in ("LN", "HP"))]
    console.print_line(heading_of(replayed.run.name, replayed.updates))
    rows = [list(map(escape, row_of(one))) for one in replays]
    caption = "; ".join([*notes, *[estimates] * (not replayed.of_run.exact)])
    print_list(console, "what each would do to this run's tokens", HEADINGS, rows, caption)
    for group, title in (("age", "age of the weights that sampled"), ("turn", "turn of the response")):
        if len(found := _sampler_by(replayed, group)) > (group == "turn"):
            rows = [(name, *cells_of(numbers)) for name, numbers in found.items()]
            print_list(console, f"the sampler against the trainer, by {title}", (group, *OF_SAMPLER), rows, OF_RATIOS)
    for one in replayed.settings:
        regained, lost = changes_of(one)
        console.print_line(f"{one.label}: regained {regained}; lost {lost}.")
    for one in replayed.settings:
        if one.against_run is not None:
            within = f"its bounds are within {one.against_run:.1g} of those it trained with"
            console.print_line(f"{one.label}: the run's own setting; {within}.")
    console.print_line(UNKNOWN)


def _sampler_by(replayed: ReplayedRun, group: str) -> dict[str, dict[str, float]]:
    return sampler_by(group, [update.table for update in replayed.updates])


def own_settings(run: Run) -> Settings | None:
    """The settings that a run trained with, by its record; None if it names none, or a loss that is not here."""
    own = {
        key.removeprefix(f"{NODE}."): value for key, value in run.configuration.items() if key.startswith(f"{NODE}.")
    }
    kept = {key: value for key, value in own.items() if not f".{key}".endswith("._target_")}
    node = {key: value for key, value in nested(kept).items() if key not in NOT_OF_THE_LOSS}
    try:
        built = build(**node)
    except (ValueError, ImportError, AttributeError):
        return None
    return built if isinstance(built, Settings) else None
