"""Finds the commit of this plugin that runs."""

import subprocess
from pathlib import Path


def commit_here() -> str | None:
    """Returns the commit of this checkout, with `+changes` if tracked files differ from it; None outside a checkout."""
    file = Path(__file__)
    # If the package is installed inside another repository, the commit would be that repository's.
    is_its_own = ["ls-files", "--error-unmatch", file.name]
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        for command in (is_its_own, describe):
            done = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
