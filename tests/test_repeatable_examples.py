"""Chance doesn't decide scripts/test.sh: its property tests draw the same examples in every run, and never shrink.

Covers: the options that the script gives pytest, and what fresh processes draw under them and under none. Not covered:
tests that draw by other means than hypothesis.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.shell import ROOT, Machine

# What the script runs before pytest, and a browser that it looks for.
TOOLS = ("mkdocs", "ruff", "shellcheck", "hadolint", "lint-imports", "chromium")


def options_of_pytest(folder: Path, *words: str) -> set[tuple[str, ...]]:
    """What scripts/test.sh tells hypothesis, in its call of pytest; all that it runs is a stand-in."""
    for name in ("scripts", "recipes", ".ci", "docker"):
        (folder / name).mkdir(parents=True)
    for name in ("environment.sh", "setup_triton.sh"):
        (folder / "scripts" / name).touch()
    script = Path(shutil.copy(ROOT / "scripts/test.sh", folder / "scripts"))
    machine = Machine(folder / "machine", python="", **dict.fromkeys(TOOLS, ""))
    done = machine.run(script, *words, END_TO_END_VLLM="0")
    assert done.returncode == 0, done.stderr
    calls = [call for call in machine.calls if call[:3] == ["python", "-m", "pytest"]]
    assert len(calls) == 1
    return {tuple(word for word in call if word.startswith("--hypothesis")) for call in calls}


def drawn(folder: Path, *options: str) -> list[str]:
    """What a property test draws in a fresh process without a record of earlier failures, to its failure and beyond."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/failing_property.py"]
    record = {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder)}
    done = subprocess.run([*command, *options], cwd=ROOT, env=os.environ | record, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("drawn")]


def draws_after_the_first_failure(lines: list[str]) -> int:
    failed = [sum(json.loads(line.removeprefix("drawn "))) >= 2000 for line in lines]
    return len(lines) - 1 - failed.index(True)


@pytest.mark.slow
def test_the_script_draws_the_same_examples_in_every_run_and_does_not_shrink(tmp_path):
    (options,) = options_of_pytest(tmp_path / "whole") | options_of_pytest(tmp_path / "fast", "--fast")
    first = drawn(tmp_path, *options)
    # Without an option too, as a contributor runs one file.
    assert first == drawn(tmp_path, *options) == drawn(tmp_path)
    # The failing example again, to see whether it fails every time.
    assert draws_after_the_first_failure(first) <= 2


@pytest.mark.slow
def test_under_all_it_draws_new_ones_and_shrinks(tmp_path):
    (options,) = options_of_pytest(tmp_path, "--all")
    first, second = (drawn(tmp_path / name, *options) for name in ("first", "second"))
    assert first != second
    assert draws_after_the_first_failure(first) > 10
