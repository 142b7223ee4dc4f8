"""Chance doesn't decide scripts/test.sh: its property tests draw the same examples in every run, and never shrink. Not
covered: tests that draw by other means than hypothesis, and hypothesis itself.
"""

import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from tests.recipes.shell import ROOT, Machine

# What the script runs before pytest, and a browser that it looks for.
TOOLS = ("mkdocs", "ruff", "shellcheck", "hadolint", "lint-imports", "chromium")


@pytest.mark.parametrize(
    ("words", "profile"), [((), "repeatable"), (("--fast",), "repeatable"), (("--all",), "random")]
)
def test_the_script_asks_for_new_ones_under_all_alone(tmp_path, words, profile):
    for name in ("scripts", "recipes", ".ci", "docker"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("environment.sh", "setup_triton.sh"):
        (tmp_path / "scripts" / name).touch()
    script = Path(shutil.copy(ROOT / "scripts/test.sh", tmp_path / "scripts"))
    machine = Machine(tmp_path / "machine", python="", **dict.fromkeys(TOOLS, ""))
    done = machine.run(script, *words, END_TO_END_VLLM="0")
    assert done.returncode == 0, done.stderr
    assert settings.get_profile(profile).derandomize == (profile == "repeatable")
    (call,) = [call for call in machine.calls if call[:3] == ["python", "-m", "pytest"]]
    assert f"--hypothesis-profile={profile}" in call
