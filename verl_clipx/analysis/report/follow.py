"""`clipx report --follow`: writes the page again and again while runs train."""

import time
from collections.abc import Callable
from pathlib import Path

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.analysis.runs.other_logs import is_of_wandb
from verl_clipx.run.run_files import VALIDATION, lock_path, record_path, traces_path
from verl_clipx.run.run_lock import is_held

SECONDS = 10.0


def follow(paths: list[Path], write: Callable[[bool], None], wait: Callable[[str], None]) -> None:
    """Writes a page whenever a run has logged something new, until none of the runs trains.

    Args:
        paths: of each run, its folder or the file of its log.
        write: writes the page; its argument says whether any run is still training.
        wait: gets a message, once, if a log has no step yet.

    Raises:
        OSError, ValueError: as `write`.
    """
    if any(map(is_of_wandb, paths)):
        raise ValueError("--follow looks at files: give the run's own log, or leave it out for a run of W&B.")
    logs, seen, waits = [RunFolder(path).log for path in paths], None, False
    while True:
        # This comes before the files are looked at, so that the last page has what a run logs last. A run trains while
        # it holds its lock; of one without a record nothing says when it ends.
        trains = any(is_held(lock_path(log)) or not record_path(log).exists() for log in logs)
        now = [_state(path) for log in logs for path in (log, traces_path(log), log.parent / VALIDATION)]
        empty = next((log for log in logs if not (log.exists() and log.stat().st_size)), None)
        if trains and empty is not None:
            if not waits:
                wait(f"{empty}: no step yet")
            waits = True
        elif now != seen or not trains:
            write(trains)
            seen = now
        if not trains:
            return
        time.sleep(SECONDS)


def _state(path: Path) -> list[tuple[str, int, int]]:
    """Returns name, time and size of a file, or of each file in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [(file.name, found.st_mtime_ns, found.st_size) for file in files for found in [file.stat()]]
