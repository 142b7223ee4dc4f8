"""Finds the commit of this plugin that runs."""

import subprocess
from pathlib import Path


def commit_here() -> str | None:
    """Return the commit of this checkout, with `+changes` if tracked files differ from it; None outside a checkout."""
    file = Path(__file__)
    # This fails if the file is not tracked. The package may be installed inside another repository, whose commit it is
    # not.
    check_tracked = ["ls-files", "--error-unmatch", file.name]
    # This prints the commit.
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        for command in (check_tracked, describe):
            done = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
