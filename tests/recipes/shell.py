"""Running the repository's shell scripts with stand-ins for the commands of a cluster."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

# Appends its name and arguments to $CALLS, one call a line, quoted; then does what the test says.
# A line is written at once: scripts run some commands side by side, and two printfs would mix their lines.
STAND_IN = """#!/usr/bin/env bash
printf -v call '%q ' "${{0##*/}}" "$@"
printf '%s\\n' "$call" >>"$CALLS"
{body}
"""


class Machine:
    """A folder whose commands come before the real ones, each by bash code, and the record of their calls."""

    def __init__(self, folder: Path, **bodies: str):
        self.commands = folder / "bin"
        self.commands.mkdir(parents=True, exist_ok=True)
        self.record = folder / "calls"
        for name, body in bodies.items():
            command = self.commands / name
            command.write_text(STAND_IN.format(body=body))
            command.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        """An environment without variables that the scripts read, but for those given."""
        path = os.pathsep.join([str(self.commands), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        return {"PATH": path, "HOME": str(self.commands.parent), "CALLS": str(self.record), **variables}

    def run(self, script: Path, *words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
        """Runs a script to its end, a minute at most."""
        return subprocess.run(
            ["bash", str(script), *words],
            cwd=cwd,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self) -> list[list[str]]:
        """The recorded calls: name and arguments."""
        return [shlex.split(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


def checkout(folder: Path) -> Path:
    """A folder with what a node needs of the repository, by links."""
    folder.mkdir()
    for name in ("recipes", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def stand_in(name: str) -> str:
    """The code of a stand-in of several lines, from its file."""
    return Path(__file__).with_name("stand_ins").joinpath(f"{name}.sh").read_text()


def options_of(words: list[str]) -> dict[str, str]:
    """The options --name=value among the words; "" for those without a value."""
    return dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))


def overrides_of(command: str) -> list[str]:
    """The overrides of a printed verl command."""
    # By bash, since %q writes $'…' for what is not ASCII.
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    words = printed.stdout.split("\0")[:-1]
    return words[words.index("verl.trainer.main_ppo") + 1 :]
