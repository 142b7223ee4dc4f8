"""`clipx replay`: reads the run and applies each setting."""

from pathlib import Path
from typing import NamedTuple

from verl_clipx.analysis.replay.measures import Replay, describe_run, replay
from verl_clipx.analysis.replay.tokens import TracedTokens, read_traced_updates
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.losses.base.method import NODE
from verl_clipx.run.candidates import candidates_of
from verl_clipx.run.config import Settings, build
from verl_clipx.run.keys import nested

# Keys of the node that do not change the loss on given tokens.
NOT_OF_THE_LOSS = ("trace", "update")


class ReplayedRun(NamedTuple):
    """A step of a run, replayed.

    Args:
        run: the run.
        updates: the step's updates with their tokens.
        as_trained: what the run itself did.
        settings: what each setting would have done.
    """

    run: Run
    updates: list[TracedTokens]
    as_trained: Replay
    settings: list[Replay]


def replay_run(path: Path, words: list[str], *, step: int | None = None) -> ReplayedRun:
    """Replays settings on a run.

    Args:
        path: the run's folder or its log.
        words: as for `candidates_of`; without any, the run's own setting.
        step: as for `read_traced_updates`.

    Raises:
        OSError, ValueError: the run has no traces that can be replayed, or a setting is wrong; the message says which.
    """
    candidates = candidates_of(words)
    run = read_run(path)
    updates = read_traced_updates(run, step)
    if not updates and step is None:
        raise ValueError(f"{run.traces}: no traced update has tokens with only finite numbers.")
    if not updates:
        raise ValueError(
            f"{run.traces}: no update of step {step} has tokens with only finite numbers; choose another step with "
            "--step."
        )
    own = own_settings(run)
    if not candidates and own is None:
        raise ValueError(f"name what to replay, for example +{NODE}=acpo {NODE}.alpha=1,2.")
    labelled = [setting for candidate in candidates for setting in candidate.each()]
    if not labelled:
        labelled = [(f"{own.method.name}, as trained", own)]
    replays = [replay(label, settings, own, updates) for label, settings in labelled]
    return ReplayedRun(run=run, updates=updates, as_trained=describe_run(updates), settings=replays)


def own_settings(run: Run) -> Settings | None:
    """Return the settings that a run trained with, by its record; None if it names none, or a loss not known here."""
    loss = run.record.loss
    node = {**nested(loss.parameters), **{name: nested(given) for name, given in loss.modifiers.items()}}
    changing = {key: value for key, value in node.items() if key not in NOT_OF_THE_LOSS}
    try:
        built = build(loss.method, loss.function, **changing)
    except (ValueError, ImportError, AttributeError):
        return None
    return built if isinstance(built, Settings) else None
