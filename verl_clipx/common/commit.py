"""Which commit of this plugin runs."""

import subprocess
from pathlib import Path


def commit_here() -> str | None:
    """The commit of this checkout, with `+changes` if tracked files differ from it; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # If the package is installed inside another repository, the commit would be that repository's.
    if not git("ls-files", "--error-unmatch", Path(__file__).name):
        return None
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changes else commit
