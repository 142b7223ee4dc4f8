"""Which verl the plugin is beside, through verl's own main: a development version that has every name is extended, one
that lacks a name is refused with that name once something of the plugin is asked for, and a run is silent until then.
Not covered: such a version's own code, since it is 0.9.1's (`bash scripts/test.sh --verl FOLDER` runs another's); that
of 0.8.0 runs in tests/end_to_end/test_wheel.py.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from hydra_plugins.verl_clipx.search_path import VerlClipxSearchPath
from tests.composition import by_hydra
from tests.messages import assert_names
from verl_clipx.common import verl_version as versions
from verl_clipx.papers.versions import versions_here
from verl_clipx.training import doctor

# Prints whether verl's own loss is known, and the names of all losses; then runs the main of the verl in the folder,
# which prints its configuration.
PROGRAM = """
import os, sys
os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
sys.path.insert(0, os.getcwd())
from verl.trainer.main_ppo import main
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print('vanilla' in POLICY_LOSS_REGISTRY, *POLICY_LOSS_REGISTRY, flush=True)
sys.argv[1:] = ["--cfg", "job", *{overrides}]
main()
"""

DEVELOPMENT_VERSION = "0.10.0.dev0"
VERL = Path(importlib.util.find_spec("verl").origin).parent


def write_verl(folder: Path, version: str) -> Path:
    """Make a verl in a folder that is the installed one but for its version, and return the package's folder."""
    package = folder / "verl"
    (package / "version").mkdir(parents=True)
    (package / "version" / "version").write_text(version)
    for path in VERL.iterdir():
        if path.name not in ("version", "__pycache__"):
            (package / path.name).symlink_to(path)
    return package


def replace_in_file(package: Path, path: str, old: str, new: str) -> None:
    """Replace a text in a file of a verl that `write_verl` made, and leave the installed verl as it is.

    The folders on the way to the file are links into the installed verl. Each becomes a folder of its own, whose
    entries are links. Without __pycache__: Python would write the changed file's bytecode into the installed verl.

    Args:
        package: the folder of the package.
        path: the file, relative to the package.
        old, new: the text, which the file must have, and what stands in its place.
    """
    file = package / path
    folder = package
    for part in Path(path).parent.parts:
        folder = folder / part
        if folder.is_symlink():
            target = folder.readlink()
            folder.unlink()
            folder.mkdir()
            for entry in target.iterdir():
                if entry.name != "__pycache__":
                    (folder / entry.name).symlink_to(entry)
    text = file.read_text()
    assert old in text
    # Unlinked first: writing to a link would write to the installed file.
    file.unlink()
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_development_version_with_every_name_is_extended_in_silence(run_fresh, tmp_path):
    write_verl(tmp_path, DEVELOPMENT_VERSION)
    plain = run_fresh(PROGRAM.format(overrides=()), tmp_path)
    assert plain.returncode == 0
    losses, _, configuration = plain.stdout.partition("\n")
    assert losses.startswith("True ")
    assert "clipx_acpo" in losses.split()
    assert configuration.startswith("actor_rollout_ref:") or "\nactor_rollout_ref:" in configuration
    assert "clipx" not in configuration + plain.stderr
    with_acpo = run_fresh(PROGRAM.format(overrides=("+clipx=acpo",)), tmp_path)
    assert with_acpo.returncode == 0
    assert "loss_mode: clipx_acpo" in with_acpo.stdout


@pytest.mark.slow
def test_a_development_version_that_has_changed_a_name_is_left_alone_until_the_plugin_is_asked_for(run_fresh, tmp_path):
    package = write_verl(tmp_path, DEVELOPMENT_VERSION)
    header = "def train_mini_batch(self, {}"
    replace_in_file(package, "workers/engine_workers.py", header.format("data"), header.format("batch"))
    # Otherwise Python would write the changed file's bytecode into the installed verl.
    assert not (package / "workers" / "__pycache__").is_symlink()
    plain = run_fresh(PROGRAM.format(overrides=()), tmp_path)
    assert plain.returncode == 0
    assert "\nactor_rollout_ref:" in plain.stdout
    assert plain.stdout.startswith("True ")
    assert "clipx" not in plain.stdout + plain.stderr
    with_acpo = run_fresh(PROGRAM.format(overrides=("+clipx=acpo",)), tmp_path)
    assert with_acpo.returncode == 1
    assert "Traceback" not in with_acpo.stderr
    change = "verl.workers.engine_workers.TrainingWorker.train_mini_batch takes (batch), not (data)"
    (line,) = [line for line in with_acpo.stderr.splitlines() if change in line]
    assert line.startswith("clipx/acpo: ")
    assert_names(line, DEVELOPMENT_VERSION, "pip install 'verl<0.10,>=0.9.0'")


@pytest.mark.parametrize(
    ("version", "changes", "level"),
    [
        ("0.9.0", ("a name",), "ok"),
        ("0.9.1", ("a name",), "ok"),
        ("0.9.1+local", ("a name",), "ok"),
        # The branch of a release, and a release that no test ran on.
        ("0.9.0.dev", (), "warning"),
        ("0.9.2", (), "warning"),
        ("0.10.0.dev", (), "warning"),
        ("0.10.0", (), "warning"),
        ("0.10.0", ("a name",), "error"),
        ("0.9.2", ("a name",), "error"),
        ("0.8.0", (), "error"),
        ("0.8.0", ("a name",), "error"),
    ],
)
def test_only_a_release_that_tests_ran_on_needs_no_look(monkeypatch, version, changes, level):
    monkeypatch.setattr("verl.__version__", version)
    monkeypatch.setattr(versions, "changes_in", lambda folder: changes)
    finding = doctor.check_verl()
    assert finding.level == level
    assert finding.result == version
    assert (versions.unsuitable_verl() is None) == (level != "error")
    assert (versions.untested_verl() is None) == (level != "warning")
    # An older verl is missing more than a name or two, so its version is the reason.
    assert ("a name" in finding.advice) == (level == "error" and bool(changes) and version != "0.8.0")


def test_each_group_refuses_an_older_verl(monkeypatch):
    monkeypatch.setattr("verl.__version__", "0.8.0")
    by_hydra("ppo_trainer")
    for group in ("+clipx=grpo", "+clipx/select=high_entropy", "+hardware=a100x8"):
        with pytest.raises(Exception, match=r"verl-clipx needs verl<0\.10,>=0\.9\.0, and this is verl 0\.8\.0"):
            by_hydra("ppo_trainer", group)


def test_doctor_names_the_version_that_python_imports_and_looks_no_further(monkeypatch):
    monkeypatch.setattr("verl.__version__", "0.8.0")
    groups = dict(doctor.examine_environment(ray=True))
    assert [*groups] == ["versions", "accelerators"]
    (error,) = [finding for group in groups.values() for finding in group if finding.level == "error"]
    assert error.subject == "verl"
    assert error.result == "0.8.0"


def test_a_command_that_is_explained_ends_since_no_hook_would_end_it(monkeypatch):
    VerlClipxSearchPath().manipulate_search_path(ConfigSearchPathImpl())
    monkeypatch.setenv("CLIPX_EXPLAIN", "1")
    VerlClipxSearchPath().manipulate_search_path(ConfigSearchPathImpl())
    monkeypatch.setattr("verl.__version__", "0.8.0")
    with pytest.raises(SystemExit, match=r"clipx explain: verl-clipx needs verl<0\.10"):
        VerlClipxSearchPath().manipulate_search_path(ConfigSearchPathImpl())


def test_without_any_verl_the_line_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl")
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    assert_names(versions.unsuitable_verl(), "no verl is installed", "pip install 'verl<0.10,>=0.9.0'")
    finding = doctor.check_verl()
    assert finding.level == "error"
    assert finding.result == "not installed"


def test_the_version_that_is_recorded_is_the_imported_one(monkeypatch):
    assert versions.version_here("verl") == versions.installed_version("verl")
    monkeypatch.setattr("verl.__version__", "0.10.0.dev")
    assert versions.version_here("verl") == "0.10.0.dev"
    assert versions_here()["verl"] == "0.10.0.dev"
    assert versions.version_here("torch") == versions.installed_version("torch")
    assert versions.version_here("no-such-distribution") is None
