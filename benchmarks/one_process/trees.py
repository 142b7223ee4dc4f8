"""Which committed code makes a run: the git tree hashes of its folders, which a rebase doesn't change."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("verl_clipx", "configs", "benchmarks")
"""The folders that a run's outcome depends on."""


def committed_trees(root: Path = ROOT) -> dict[str, str]:
    """Returns the tree hash of each of TREES in the last commit, in hexadecimal.

    Raises:
        ValueError: there is no git repository, or a folder differs from its last commit.
    """
    changed = git(root, "status", "--porcelain", "--", *TREES).splitlines()
    if changed:
        raise ValueError(
            f"{changed[0].strip()}: not committed, so that a kept log could not name its code. Commit it first; "
            "--rehearse trains one batch and keeps nothing"
        )
    hashes = git(root, "rev-parse", *(f"HEAD:{name}" for name in TREES)).split()
    return dict(zip(TREES, hashes, strict=True))


def trees_in_history(root: Path = ROOT) -> dict[str, set[str]]:
    """Returns every tree hash that each of TREES has had in the history of the last commit."""
    commits = git(root, "rev-list", "HEAD").split()
    return {name: _objects(root, (f"{commit}:{name}" for commit in commits)) for name in TREES}


def _objects(root: Path, names: Iterable[str]) -> set[str]:
    """Returns the hashes of what git finds under these names."""
    lines = git(root, "cat-file", "--batch-check=%(objectname)", given="\n".join(names)).splitlines()
    return {line for line in lines if not line.endswith(" missing")}


def git(root: Path, *words: str, given: str | None = None) -> str:
    """Returns what a git command prints in a folder.

    Raises:
        ValueError: git is missing or fails.
    """
    try:
        done = subprocess.run(["git", *words], cwd=root, input=given, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ValueError(f"git can't be started ({error}): a kept log names the tree hashes of its code") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"git {words[0]} in {root}: {error.stderr.strip()}") from None
    return done.stdout
