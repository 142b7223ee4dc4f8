"""Which verl the plugin is beside, through verl's own main: in silence until something of the plugin is asked for. Not
covered: such a version's own code, since it is 0.9.1's; that of 0.8.0 runs in tests/end_to_end/test_wheel.py.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from hydra_plugins.verl_clipx.search_path import VerlClipxSearchPath
from tests.composition import by_hydra
from verl_clipx.common import verl_version as versions
from verl_clipx.training import doctor

# verl's main in a folder with a verl of its own, after the losses that it knows.
MAIN = """
import os, sys
os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
sys.path.insert(0, os.getcwd())
from verl.trainer.main_ppo import main
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as known
print('vanilla' in known, *known, flush=True)
sys.argv[1:] = ["--cfg", "job", *{words}]
main()
"""


@pytest.mark.slow
def test_beside_another_version_it_is_silent_until_it_is_asked_for(run_fresh, tmp_path):
    version = "0.10.0.dev0"
    # A verl that says it has another version.
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text(version)
    for path in Path(importlib.util.find_spec("verl").origin).parent.iterdir():
        if path.name not in ("version", "__pycache__"):
            (tmp_path / "verl" / path.name).symlink_to(path)
    plain = run_fresh(MAIN.format(words=()), tmp_path)
    assert plain.returncode == 0 and "\nactor_rollout_ref:" in plain.stdout
    assert plain.stdout.startswith("True ") and "clipx" not in plain.stdout + plain.stderr
    done = run_fresh(MAIN.format(words=("+clipx=acpo",)), tmp_path)
    line = f"clipx/acpo: verl-clipx needs verl<0.10,>=0.9.0, and this is verl {version}: pip install"
    assert done.returncode == 1 and [line in one for one in done.stderr.splitlines()].count(True) == 1
    assert "Traceback" not in done.stderr


def test_each_group_asks(monkeypatch):
    monkeypatch.setattr("verl.__version__", "0.8.0")
    by_hydra("ppo_trainer")
    for group in ("+clipx=grpo", "+clipx/select=high_entropy", "+hardware=a100x8"):
        with pytest.raises(Exception, match=r"verl-clipx needs verl<0\.10,>=0\.9\.0, and this is verl 0\.8\.0"):
            by_hydra("ppo_trainer", group)


def test_doctor_names_the_version_that_python_imports_and_looks_no_further(monkeypatch):
    monkeypatch.setattr("verl.__version__", "0.8.0")
    groups = dict(doctor.examine(ray=True))
    assert [*groups] == ["versions", "accelerators"]
    errors = [finding for group in groups.values() for finding in group if finding.level == "error"]
    assert [(error.subject, error.found) for error in errors] == [("verl", "0.8.0")]


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
    assert "and no verl is installed: pip install 'verl<0.10,>=0.9.0'" in versions.unsuitable_verl()
    assert doctor.in_range("verl", doctor.VERL_RANGE, "error").found == "not installed"
