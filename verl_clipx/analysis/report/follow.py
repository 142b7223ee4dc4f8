"""`clipx report --follow`: writes the page again and again while runs train."""

import time
from collections.abc import Callable
from pathlib import Path

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.analysis.runs.other_logs import is_of_wandb
from verl_clipx.run.run_files import VALIDATION, lock_path, record_path, traces_path

SECONDS = 10.0
NO_LOCKS = (
    "--follow needs file locks, which Windows lacks: leave it out, and run the command again while the run trains."
)


def follow_runs(paths: list[Path], write: Callable[[bool], None], wait: Callable[[str], None]) -> None:
    """Write a page whenever a run has logged something new, until none of the runs trains.

    Args:
        paths: of each run, its folder or the file of its log.
        write: writes the page; its argument says whether any run is still training.
        wait: gets a message, once, if a log has no step yet.

    Raises:
        OSError, ValueError: as `write`.
        ValueError: this system has no file locks, such as Windows.
    """
    try:
        from verl_clipx.run.run_lock import is_held
    except ModuleNotFoundError as error:
        raise ValueError(NO_LOCKS) from error
    if any(map(is_of_wandb, paths)):
        raise ValueError("--follow watches files: name the run's own log, or leave --follow out for a run at W&B.")
    logs = [RunFolder(path).log for path in paths]
    written_at = None
    has_waited = False
    while True:
        # This comes before the files are looked at, so that the last page has what a run logs last. A run trains while
        # it holds its lock; of one without a record nothing says when it ends.
        trains = any(is_held(lock_path(log)) or not record_path(log).exists() for log in logs)
        state = []
        for log in logs:
            state += [_state_of(log), _state_of(traces_path(log)), _state_of(log.parent / VALIDATION)]
        empty = next((log for log in logs if not (log.exists() and log.stat().st_size)), None)
        if trains and empty is not None:
            if not has_waited:
                wait(f"{empty}: no step yet")
            has_waited = True
        elif state != written_at or not trains:
            write(trains)
            written_at = state
        if not trains:
            return
        time.sleep(SECONDS)


def _state_of(path: Path) -> list[tuple[str, int, int]]:
    """Return name, time of change in nanoseconds, and size in bytes of a file, or of each file in a folder."""
    if not path.exists():
        return []
    state = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        status = file.stat()
        state.append((file.name, status.st_mtime_ns, status.st_size))
    return state
