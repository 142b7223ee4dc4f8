"""The wheel that pip builds, in an environment that knows nothing of the repository.

Covers: the wheel's content; its entry point, Hydra groups and command working from site-packages, outside the
checkout, on verl's own main. The environment borrows the installed dependencies (a directory on its path), so their
installation is not covered; scripts/quickstart.sh covers that.
"""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """As `pip install .` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    interpreter = folder / "bin" / "python"
    pip("--python", interpreter, "install", "--no-deps", wheel)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # A directory added by a .pth file does not have its own .pth files read, so the editable install stays unseen.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return interpreter


def pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def run(python, folder, *arguments):
    return subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_wheel_carries_groups_and_plugins(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("verl_clipx/configs/clipx/acpo.yaml", "verl_clipx/configs/hardware/cpu.yaml"):
        assert name in names
    assert "verl_clipx/configs/recipe/acpo/presets.yaml" in names
    assert {"hydra_plugins/verl_clipx/search_path.py", "hydra_plugins/verl_clipx/preset_source.py"} <= {*names}
    assert not [name for name in names if name.startswith(("tests/", "configs/", "runs/"))]


def test_verls_own_main_composes_a_run_and_its_groups(python, tmp_path):
    where = run(python, tmp_path, "-c", "import verl_clipx; print(verl_clipx.__file__)")
    assert where.stdout.startswith(str(python.parents[1]))
    done = run(python, tmp_path, "-m", "verl.trainer.main_ppo", "+recipe=acpo/countdown_3b_acpo_off", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "loss_mode: clipx_acpo" in done.stdout and "experiment_name: countdown_3b_acpo_off" in done.stdout


def test_the_losses_are_registered(python, tmp_path):
    code = "from verl.trainer.ppo.core_algos import get_policy_loss_fn; print(get_policy_loss_fn('clipx_bapo'))"
    done = run(python, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "policy_loss" in done.stdout


def test_the_command_is_there(python, tmp_path):
    done = subprocess.run([python.parent / "clipx", "methods"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "clipx_acpo" in done.stdout
