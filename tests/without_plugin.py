"""A Python with what the tests' own has, but for the plugin: neither its files nor its entry point."""

import os
import subprocess
import sys
from pathlib import Path


def link_all_but_plugin(folder: Path) -> None:
    """Fill a folder with links to the packages of this environment, without the plugin and what points to it."""
    for entry in map(Path, sys.path):
        if entry.name == "site-packages" and entry.is_dir():
            for path in entry.iterdir():
                is_plugin = path.name.startswith(("verl_clipx", "hydra_plugins"))
                link = folder / path.name
                if not is_plugin and path.suffix != ".pth" and not link.exists():
                    link.symlink_to(path)


def run_without_plugin(packages: Path, folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with these packages in place of its environment's own."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=folder, env=environment)
