"""The commands that look at runs, without the modules that Python has on Unix alone. Not covered: Windows itself, with
its paths and encodings, and training, for which verl needs Linux.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.runs.example_runs import write_run

# Python runs a module of this name before anything else.
SITECUSTOMIZE = """
import sys


class Hidden:
    def find_spec(self, name, *_):
        if name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""


def clipx(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs a command in a folder, without these modules."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "verl_clipx.cli", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", ["demo", "methods acpo", "diagnose run", "report run --out page"])
def test_a_command_needs_no_module_of_unix(tmp_path, words):
    write_run(tmp_path / "run", "acpo")
    result = clipx(tmp_path, *words.split())
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_following_says_what_to_do_instead(tmp_path):
    write_run(tmp_path / "run", "acpo")
    result = clipx(tmp_path, "report", "run", "--out", "page", "--follow")
    assert result.returncode == 1 and "leave it out" in result.stdout and "Traceback" not in result.stderr
