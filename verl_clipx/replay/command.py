"""`clipx replay`: reads the run, applies each setting, and prints what each would do."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from verl_clipx.base.method import NODE
from verl_clipx.common.sentences import Finding
from verl_clipx.common.terminal import TerminalConsole, print_list
from verl_clipx.replay.match import Match, find_match, target_of
from verl_clipx.replay.measures import Replay, of_run, replay
from verl_clipx.replay.output import (
    BY_PROBABILITY,
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
from verl_clipx.replay.tokens import TracedTokens, traced_step
from verl_clipx.run.candidates import Candidate, candidates_of
from verl_clipx.run.config import Settings, build
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run
from verl_clipx.runs.sameness import nested

# Keys of the node that do not change the loss on given tokens.
NOT_OF_THE_LOSS = ("trace", "update")


@dataclass(frozen=True)
class ReplayedRun:
    """A run's step under several settings.

    Args:
        updates: the updates of the step, with their tokens.
        of_run: what the run itself did.
        settings: what each setting would have done.
        target: the quantity to match and its value, or None.
        matches: each matched setting, and what was found for it.
    """

    run: Run
    updates: list[TracedTokens]
    of_run: Replay
    settings: list[Replay]
    target: tuple[str, float] | None
    matches: list[tuple[Replay, Match]]


def replay_run(path: Path, words: list[str], *, step: int | None = None, match: str | None = None) -> ReplayedRun:
    """Replays settings on a run.

    Args:
        words: as for `candidates_of`; without any, the run's own setting.
        step: as for `traced_step`.
        match: as for `target_of`, or None.

    Raises:
        OSError, ValueError: the run has no traces that can be replayed, or a setting is wrong; the message says which.
    """
    target = None if match is None else target_of(match)
    candidates = candidates_of(words)
    run = read_run(path)
    updates = traced_step(run, step)
    if not updates:
        raise ValueError(
            f"{run.traces}: no update of this step has tokens with finite numbers; name another by --step."
        )
    replays = list(replay_settings(candidates, target, own_settings(run), updates))
    matches = [(one, found) for one, found in replays if found]
    return ReplayedRun(run, updates, of_run(updates), [one for one, _ in replays], target, matches)


def content_of(replayed: ReplayedRun, tokens: int) -> dict[str, Any]:
    """All numbers of a replay, for JSON, with so many changed tokens of each setting."""
    return {
        "run": replayed.run.name,
        "step": replayed.updates[0].step,
        "exact": replayed.of_run.exact,
        "of_run": as_json(replayed.of_run, 0),
        "settings": [as_json(one, tokens) for one in replayed.settings],
        "matches": [{"setting": one.label, **found._asdict()} for one, found in replayed.matches],
        "unknown": UNKNOWN,
    }


def print_replayed(console: TerminalConsole, replayed: ReplayedRun) -> None:
    """Prints a replay: lists, then what was matched, how near the run's own setting comes, and what is unknown."""
    replays = [replayed.of_run, *replayed.settings]
    estimates = "estimates, [95 % interval over prompts] where each update has five prompts"
    notes = [MEANINGS, *[OUTSIDE] * any(keeps_outside(one, side) for one in replays for side in ("LN", "HP"))]
    console.print_line(heading_of(replayed.run.name, replayed.updates))
    rows = [list(map(escape, row_of(one))) for one in replays]
    caption = "; ".join([*notes, *[estimates] * (not replayed.of_run.exact)])
    print_list(console, "what each would do to this run's tokens", HEADINGS, rows, caption)
    rows = [
        [escape(one.label), *(f"{100 * low:.2f} / {100 * high:.2f}" for low, high in one.clipped_by_probability)]
        for one in replays
    ]
    print_list(console, "% of the tokens beyond the bounds, low / high, by old probability", BY_PROBABILITY, rows)
    for one in replayed.settings:
        regained, lost = changes_of(one)
        console.print_line(f"{one.label}: regained {regained}; lost {lost}.")
    for one, found in replayed.matches:
        console.print_line(" ".join(say_match(one, found, *replayed.target)))
    for one in replayed.settings:
        if one.against_run is not None:
            within = f"its bounds are within {one.against_run:.1g} of those it trained with"
            console.print_line(f"{one.label}: the run's own setting; {within}.")
    console.print_line(UNKNOWN)


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


def replay_settings(
    candidates: list[Candidate], target: tuple[str, float] | None, own: Settings | None, updates: list[TracedTokens]
) -> Iterator[tuple[Replay, Match | None]]:
    """Each setting on the updates, without any the run's own, and what was found if its parameter was looked for.

    Raises:
        ValueError: there is nothing to replay.
    """
    if not candidates:
        if own is None or target is not None:
            raise ValueError(f"name what to replay, for example +{NODE}=acpo {NODE}.alpha=1,2.")
        yield replay(f"{own.method.name}, as trained", own, own, updates), None
    for candidate in candidates:
        if target is None:
            yield from ((replay(label, settings, own, updates), None) for label, settings in candidate.each())
        else:
            match = find_match(candidate, *target, own, updates)
            label = candidate.label({match.parameter: f"{match.value:.6g}"})
            yield replay(label, candidate.settings({match.parameter: match.value}), own, updates), match


def say_match(replay: Replay, match: Match, quantity: str, target: float) -> Finding:
    """What `--match` found, of the setting with the value that was found."""
    label = replay.label
    if match.crossings == 0:
        wider = " or ".join(f"{NODE}.{name}" for name in match.others)
        return Finding(
            f"{label}: {quantity} is not {target:g} anywhere in the range.",
            f"It lies between {match.least:.4g} and {match.greatest:.4g}; nearest is {match.reached:.4g}."
            + (f" Another value of {wider} may reach it." if wider else ""),
        )
    reached = f"{match.reached:.4g}"
    head, text = f"The closest reachable {quantity} to {target:g} is {reached}, under {label}.", ""
    if reached == f"{target:.4g}":
        head = f"{quantity} is {target:g} under {label}."
    elif match.beyond is not None:
        text = (
            "It moves in steps, because there are finitely many tokens: by "
            f"{abs(match.reached - match.beyond):.2g} here, to {match.beyond:.4g} on the other side. "
        )
    if match.crossings > 1:
        text += f"It passes {target:g} {match.crossings} times in the range, and this is the first. "
    if replay.exact:
        text += "Exact: every token of the step is traced."
    elif match.low is None:
        reason = "it passes the number several times" if match.crossings > 1 else "too few prompts are traced"
        text += f"An estimate without an interval, since {reason}."
    else:
        interval = f"95\u202f% interval of {match.parameter} over prompts {match.low:.3g} to {match.high:.3g}"
        text += f"An estimate: {interval}."
    return Finding(head, text)
