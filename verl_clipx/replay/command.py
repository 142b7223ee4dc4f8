"""`clipx replay`: reads the run, applies each setting, and prints what each would do."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from verl_clipx.base.method import NODE
from verl_clipx.common.listed import print_list
from verl_clipx.common.sentences import Finding
from verl_clipx.common.terminal import TerminalConsole
from verl_clipx.replay.match import Match, matched, target_of
from verl_clipx.replay.measures import Replay, of_run, replay
from verl_clipx.replay.output import (
    BY_PROBABILITY,
    HEADINGS,
    UNKNOWN,
    as_json,
    by_probability_of,
    heading_of,
    row_of,
)
from verl_clipx.replay.tokens import TracedTokens, traced_step
from verl_clipx.run.candidates import Candidate, candidates_of
from verl_clipx.run.config import Settings, build
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.run import Run

# Keys of the node that do not change the loss on given tokens.
NOT_OF_THE_LOSS = ("trace", "update")


@dataclass(frozen=True)
class Replayed:
    """A run's step under several settings.

    Args:
        updates: the updates of the step, with their tokens.
        of_run: what the run itself did.
        settings: what each setting would have done.
        target: the quantity to match and its value, or None.
        matches: the label of each matched setting, and what was found for it.
    """

    run: Run
    updates: list[TracedTokens]
    of_run: Replay
    settings: list[Replay]
    target: tuple[str, float] | None
    matches: list[tuple[str, Match]]

    @property
    def exact(self) -> bool:
        """Whether every token of the step is traced."""
        return self.of_run.exact


def replayed(path: Path, words: list[str], *, step: int | None = None, match: str | None = None) -> Replayed:
    """Replays settings on a run.

    Args:
        path: the run's folder or log.
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
    own = own_settings(run)
    found, matches = [], []
    for label, settings, one in chosen_settings(candidates, target, own, updates):
        found.append(replay(label, settings, own, updates))
        matches += [one] if one else []
    return Replayed(run, updates, of_run(updates), found, target, matches)


def content_of(found: Replayed, tokens: int) -> dict[str, Any]:
    """All numbers of a replay, for JSON.

    Args:
        tokens: how many changed tokens of each setting are in it.
    """
    return {
        "run": found.run.name,
        "step": found.updates[0].step,
        "exact": found.exact,
        "of_run": as_json(found.of_run, 0),
        "settings": [as_json(one, tokens) for one in found.settings],
        "matches": [{"setting": label, **one._asdict()} for label, one in found.matches],
        "unknown": UNKNOWN,
    }


def print_replayed(console: TerminalConsole, found: Replayed) -> None:
    """Prints a replay: lists, then what was matched, how near the run's own setting comes, and what is unknown."""
    replays = [found.of_run, *found.settings]
    caption = "" if found.exact else "estimates, [95 % interval over prompts] where each update has five prompts"
    console.print_line(heading_of(found.run.name, found.updates))
    rows = [list(map(escape, row_of(one))) for one in replays]
    print_list(console, "what each would do to this run's tokens", HEADINGS, rows, caption)
    rows = [list(map(escape, by_probability_of(one))) for one in replays]
    print_list(console, "clipped low / high by old probability", BY_PROBABILITY, rows)
    lines = [" ".join(said(label, one, *found.target, exact=found.exact)) for label, one in found.matches]
    lines += [
        f"{one.label}: the run's own setting; its bounds are within {one.against_run:.1g} of those it trained with."
        for one in found.settings
        if one.against_run is not None
    ]
    for line in [*lines, UNKNOWN]:
        console.print_line(line)


def own_settings(run: Run) -> Settings | None:
    """The settings that a run trained with, by its record; None if it names none, or a loss that is not here."""
    node: dict[str, Any] = {}
    for key, value in run.configuration.items():
        parts = key.split(".")
        if parts[0] == NODE and len(parts) > 1 and parts[1] not in NOT_OF_THE_LOSS and parts[-1] != "_target_":
            at = node
            for part in parts[1:-1]:
                at = at.setdefault(part, {})
            at[parts[-1]] = value
    try:
        built = build(**node)
    except (ValueError, ImportError, AttributeError):
        return None
    return built if isinstance(built, Settings) else None


def chosen_settings(
    candidates: list[Candidate], target: tuple[str, float] | None, own: Settings | None, updates: list[TracedTokens]
) -> Iterator[tuple[str, Settings, tuple[str, Match] | None]]:
    """For each setting its label, itself, and if its parameter was looked for, the label again and what was found.

    Raises:
        ValueError: there is nothing to replay.
    """
    if not candidates:
        if own is None or target is not None:
            raise ValueError(f"name what to replay, for example +{NODE}=acpo {NODE}.alpha=1,2.")
        yield f"{own.method.name}, as trained", own, None
    for candidate in candidates:
        if target is None:
            yield from ((label, settings, None) for label, settings in candidate.each())
            continue
        one = matched(candidate, *target, own, updates)
        chosen = {one.parameter: one.value}
        label = candidate.label({one.parameter: f"{one.value:.6g}"})
        yield label, candidate.settings(chosen), (label, one)


def said(label: str, one: Match, quantity: str, target: float, *, exact: bool) -> Finding:
    """What `--match` found.

    Args:
        label: that of the setting with the value that was found.
        one: what was found.
        quantity, target: as `target_of` returns them.
        exact: whether every token is traced.
    """
    if one.crossings == 0:
        wider = " or ".join(f"{NODE}.{name}" for name in one.others)
        return Finding(
            f"{label}: {quantity} is not {target:g} anywhere in the range.",
            f"It lies between {one.least:.4g} and {one.greatest:.4g}; nearest is {one.reached:.4g}."
            + (f" Another value of {wider} may reach it." if wider else ""),
        )
    reached = f"{one.reached:.4g}"
    head = f"The closest reachable {quantity} to {target:g} is {reached}, under {label}."
    text = ""
    if reached == f"{target:.4g}":
        head = f"{quantity} is {target:g} under {label}."
    elif one.beyond is not None:
        text = (
            f"It moves in steps, because there are finitely many tokens: by {abs(one.reached - one.beyond):.2g} here, "
            f"to {one.beyond:.4g} on the other side. "
        )
    if one.crossings > 1:
        text += f"It passes {target:g} {one.crossings} times in the range, and this is the first. "
    if exact:
        text += "Exact: every token of the step is traced."
    elif one.low is None:
        reason = "it passes the number several times" if one.crossings > 1 else "too few prompts are traced"
        text += f"An estimate without an interval, since {reason}."
    else:
        text += f"An estimate: 95\u202f% interval of {one.parameter} over prompts {one.low:.3g} to {one.high:.3g}."
    return Finding(head, text)
