"""The wheel and the sdist, and the wheel in environments that know nothing of the repository. Covers: content and
metadata; installation and uninstallation beside verl 0.8.0 and 0.9.1; Hydra groups, losses and commands from
site-packages; the losses beside torch alone; with `-m matrix`, as at each release, docs/elsewhere.md's trainers in TRL,
docs/install.md's installation without a network, `uv run --with` and Ray's workers under it, two steps of ACPO, and
verl's main on 0.8.0. Not covered: uv's projects and lock files, 0.9.0 (test_verl_versions.py), a later version
(tests/common/test_verl_version.py), other packages of an older verl's environment.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.claims.documents import ROOT, blocks_of
from tests.claims.test_named_pages import pages_of_messages

from .runs import check_receipt, common_overrides, train

pytestmark = pytest.mark.end_to_end

# Of the environment of the tests, what the new ones must not see: this project, verl, and what verl brings beside it.
HIDDEN = re.compile(r"(verl|verl_clipx|hydra_plugins|tests|scripts|recipe|pip|_editable\w*)(-.*|\.pth)?")
INSTALL = ("install", "--no-compile")
MAIN = ("-m", "verl.trainer.main_ppo")


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory) -> Path:
    """The folder of a wheel and an sdist: what scripts/release.sh has built, or built here."""
    if "ARTEFACTS" in os.environ:
        return Path(os.environ["ARTEFACTS"])
    folder = tmp_path_factory.mktemp("artefacts")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(artefacts) -> Path:
    (wheel,) = artefacts.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def underneath(tmp_path_factory) -> Path:
    """A folder with links to the packages of the tests' environment, without those that are HIDDEN."""
    folder = tmp_path_factory.mktemp("underneath")
    for installed in (Path(entry) for entry in sys.path if any(Path(entry).glob("*.dist-info"))):
        for path in installed.iterdir():
            if not HIDDEN.fullmatch(path.name) and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


def make_environment(folder: Path, underneath: Path | str, verl: str) -> Path:
    """The interpreter of a new environment with this verl of the index and all else from underneath."""
    venv.create(folder)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # The environment's own verl comes before one underneath.
    (site_packages / "underneath.pth").write_text(f"{underneath}\n")
    pip(python, *INSTALL, "--no-deps", f"verl=={verl}")
    return python


def pip(python: Path, *arguments: str | Path) -> str:
    """What pip prints that acts on an environment, which needs none of its own."""
    command = [sys.executable, "-m", "pip", "--quiet", "--python", python, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory, underneath, wheel) -> Path:
    """The interpreter of an environment with verl 0.9.1 and the wheel, which is all that its installation added."""
    python = make_environment(tmp_path_factory.mktemp("environment"), underneath, "0.9.1")
    before = packages(python)
    pip(python, *INSTALL, "--no-index", wheel)
    assert packages(python) ^ before == {"verl-clipx"}
    return python


def packages(python: Path) -> set[str]:
    # A wheel from a folder is listed with the file's address.
    return {line.split(" @ ")[0] for line in pip(python, "freeze").splitlines()}


def run(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VERL_LOGGING_LEVEL": "ERROR"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def below(folder: str) -> set[str]:
    """The files below one of the repository's folders."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}


def test_the_wheel_carries_the_package_its_groups_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"verl_clipx", "hydra_plugins", "verl_clipx-0.1.0.dist-info"}
    assert {f"verl_clipx/{name}" for name in below("configs")} == {name for name in names if "/configs/" in name}
    results = below("docs/results/cpu") | below("docs/results/gpu")
    expected_results = {f"verl_clipx/{name.removeprefix('docs/')}" for name in results}
    assert expected_results == {name for name in names if "/results/" in name}
    assert {name for name in names if "/docs/" in name} == {f"verl_clipx/{page}" for page in pages_of_messages()}
    demo = below("verl_clipx/analysis/demo/shipped")
    assert len(demo) > 20 and demo == {name for name in names if "/shipped/" in name}
    assert {"hydra_plugins/verl_clipx/search_path.py", "hydra_plugins/verl_clipx/preset_source.py"} <= {*names}
    assert len(names) == len({*names}) and not [name for name in names if re.search(r"(^|/)(tests?|runs/data)/", name)]


def test_the_sdist_carries_what_the_wheel_is_built_from(artefacts):
    (sdist,) = artefacts.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".gitignore", "PKG-INFO"}
    assert beside == {name for name in names if "/" not in name}
    assert {name.split("/")[0] for name in names} - beside == {"verl_clipx", "hydra_plugins", "configs", "docs"}
    pages = {*pages_of_messages(), *below("docs/results/cpu"), *below("docs/results/gpu")}
    assert {name for name in names if name.startswith("docs/")} == pages


def test_the_metadata_are_what_an_index_asks_for(wheel):
    metadata = message_from_string(zipfile.ZipFile(wheel).read("verl_clipx-0.1.0.dist-info/METADATA").decode())
    # An index refuses versions of the format that it does not know.
    assert (metadata["Metadata-Version"], metadata["Name"], metadata["Version"]) == ("2.4", "verl-clipx", "0.1.0")
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert metadata["Requires-Python"] == "<3.13,>=3.10" and metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


@pytest.fixture(scope="module")
def on_0_8_0(tmp_path_factory, underneath) -> Path:
    """The interpreter of an environment with verl 0.8.0, which loads no plugins: only Hydra finds this one."""
    return make_environment(tmp_path_factory.mktemp("environment"), underneath, "0.8.0")


def test_it_installs_beside_another_verl_and_goes_without_a_trace(on_0_8_0, wheel):
    def files() -> set[Path]:
        return {path for path in on_0_8_0.parents[1].rglob("*") if path.is_file() and path.suffix != ".pyc"}

    packages_before = packages(on_0_8_0)
    files_before = files()
    assert "verl==0.8.0" in packages_before and "verl-clipx" not in str(packages_before)
    pip(on_0_8_0, *INSTALL, "--no-index", wheel)
    assert packages(on_0_8_0) ^ packages_before == {"verl-clipx"}
    pip(on_0_8_0, "uninstall", "--yes", "verl-clipx")
    assert files() == files_before


@pytest.mark.matrix
def test_beside_another_verl_it_is_silent_until_it_is_asked(on_0_8_0, wheel, tmp_path):
    plain = (on_0_8_0, *MAIN, "--cfg", "job")
    without = run(tmp_path, *plain)
    pip(on_0_8_0, *INSTALL, "--no-index", wheel)
    beside = run(tmp_path, *plain)
    assert beside.returncode == 0 and (beside.stdout, beside.stderr) == (without.stdout, without.stderr)
    line = "verl-clipx needs verl<0.10,>=0.9.0, and this is verl 0.8.0: pip install"
    with_group = run(tmp_path, *plain, "+clipx=acpo")
    assert with_group.returncode == 1 and with_group.stderr.count(f"clipx/acpo: {line}") == 1
    assert "Traceback" not in with_group.stderr
    # No hook would end the command before it trains.
    explained = run(tmp_path, on_0_8_0.parent / "clipx", "explain", "--", on_0_8_0, *MAIN)
    assert explained.returncode == 1 and f"clipx explain: {line}" in explained.stdout
    assert "actor" not in explained.stdout


@pytest.mark.matrix
def test_without_a_network(tmp_path):
    page = (ROOT / "docs" / "install.md").read_text()
    (block,) = [block for block in blocks_of(page) if "--no-index" in block.text]
    venv.create(tmp_path / "environment", with_pip=True)
    script = block.text.replace("wheelhouse", str(tmp_path / "wheelhouse")).replace("have.txt", str(tmp_path / "have"))
    path = f"{tmp_path / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = run(ROOT, "bash", "-ec", script, PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    # As metadata say: of what verl brings, torch included, nothing.
    python = tmp_path / "environment" / "bin" / "python"
    names = {line.split("==")[0] for line in packages(python)}
    assert {"verl-clipx", "hydra-core"} <= names and not {"verl", "torch"} & names
    pip(python, "check")


# A loss of the registry, where the plugin is, and then what verl's main prints of a composed run: one import of verl.
COMPOSE = """
import runpy, sys
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print(get_policy_loss_fn("clipx_bapo"), sys.modules["verl_clipx"].__file__)
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
"""


def check_composes(python: Path, folder: Path, where: Path, **variables: str) -> None:
    """Checks that verl finds the losses and the groups of the plugin that is there."""
    arguments = ("-c", COMPOSE, "+recipe=acpo/countdown_3b_acpo_off", "--cfg", "job")
    result = run(folder, python, *arguments, **variables)
    assert result.returncode == 0, result.stderr
    first_line, _, composed = result.stdout.partition("\n")
    # Registered by the entry point, without an import of ours.
    assert "policy_loss" in first_line and str(where) in first_line
    assert "loss_mode: clipx_acpo" in composed and "experiment_name: countdown_3b_acpo_off" in composed


def test_verl_registers_its_losses_and_composes_its_groups(python, tmp_path):
    check_composes(python, tmp_path, python.parents[1])


def test_the_commands_are_there(python, tmp_path):
    for command, printed in (("methods", "clipx_acpo"), ("demo", "clipx-demo/report.html")):
        result = run(tmp_path, python.parent / "clipx", command)
        assert result.returncode == 0 and printed in result.stdout, result.stdout + result.stderr


@pytest.fixture(scope="module")
def python_and_plugin(tmp_path_factory, underneath, wheel) -> tuple[Path, Path]:
    """The interpreter of an environment with verl and without the plugin, and a folder with it: pip's --target."""
    python = make_environment(tmp_path_factory.mktemp("bare"), underneath, "0.9.1")
    folder = tmp_path_factory.mktemp("shared") / "clipx"
    pip(python, *INSTALL, "--no-deps", "--target", folder, wheel)
    assert "verl-clipx" not in packages(python)
    return python, folder


def test_a_folder_on_pythons_path_is_enough(python_and_plugin, tmp_path):
    python, folder = python_and_plugin
    check_composes(python, tmp_path, folder, PYTHONPATH=str(folder))


PRINT_LOSSES_OF_A_TASK = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=eval(sys.argv[1]))
@ray.remote
def losses():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    return sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith("clipx_"))
print(ray.get(losses.remote(), timeout=900))
"""


@pytest.mark.matrix
def test_ray_carries_the_wheel_or_the_path_to_its_workers(python_and_plugin, wheel, tmp_path):
    python, folder = python_and_plugin
    for environment in ({"py_modules": [str(wheel)]}, {"env_vars": {"PYTHONPATH": str(folder)}}, {}):
        result = run(tmp_path, python, "-c", PRINT_LOSSES_OF_A_TASK, repr(environment), PYTHONPATH="")
        assert result.returncode == 0, result.stderr
        assert ("clipx_acpo" in result.stdout) == bool(environment), environment


@pytest.mark.matrix
def test_it_explains_a_command_and_trains(python, task, tmp_path):
    command = [python, *MAIN, *common_overrides(task, tmp_path, 2), "+clipx=acpo"]
    explained = run(tmp_path, python.parent / "clipx", "explain", "--", *command, VERL_PLATFORM="cpu")
    assert explained.returncode == 0 and "clipx_acpo (+clipx=acpo)" in explained.stdout, explained.stdout
    check_receipt(train(task, tmp_path, "+clipx=acpo", python=str(python)))


# Of a process, without torch's own import, at most.
SECONDS_OF_IMPORT = 0.3
BESIDE_TORCH = """
import sys, time, torch
before = time.process_time()
import verl_clipx
from verl_clipx import check_gradient, clip_loss
took = time.process_time() - before
from verl_clipx.losses.methods import BUILT_IN
tokens = [torch.randn(4, 9) for _ in range(3)] + [torch.ones(4, 9)]
for name in BUILT_IN:
    log_prob = tokens[0].clone().requires_grad_()
    loss, _ = clip_loss(name)(log_prob, *tokens[1:], rollout_log_prob=tokens[1])
    loss.mean().backward()
    assert check_gradient(*tokens, log_prob.grad, name, rollout_log_prob=tokens[1])
assert not {"numpy", "omegaconf", "verl"} & {*sys.modules}, verl_clipx.__file__
print(took, verl_clipx.__file__)
"""


def test_the_losses_need_nothing_but_torch(underneath, wheel, tmp_path):
    names = ["torch"]
    links = tmp_path / "torch"
    links.mkdir()
    for name in names:
        for requirement in map(Requirement, distribution(name).requires or ()):
            if requirement.name not in names and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
                names.append(requirement.name)
        for entry in {file.parts[0] for file in distribution(name).files} - {"..", "__pycache__"}:
            (links / entry).symlink_to(underneath / entry)
    venv.create(tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    (site_packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site_packages / "torch.pth").write_text(f"{links}\n")
    pip(python, *INSTALL, "--no-deps", "--no-index", wheel)
    # The first run compiles.
    run(tmp_path, python, "-W", "ignore", "-c", BESIDE_TORCH, PYTHONPATH="")
    result = run(tmp_path, python, "-W", "ignore", "-c", BESIDE_TORCH, PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    seconds, file = result.stdout.split()
    assert float(seconds) < SECONDS_OF_IMPORT and str(site_packages) in file


@pytest.mark.matrix
def test_the_pages_trainers_have_trls_own_gradients_and_those_of_acpo(wheel, tmp_path):
    venv.create(tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    (site_packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    # Not through links, which the data set's hash does not take; the script hides verl.
    entries = [entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))]
    (site_packages / "underneath.pth").write_text("\n".join(entries))
    pip(python, *INSTALL, "--no-deps", "trl==1.16.0", wheel)
    page = (ROOT / "docs" / "elsewhere.md").read_text()
    for module, name in (("clip_trainer", "ClipTrainer"), ("short_trainer", "ShortTrainer")):
        (block,) = [block.text for block in blocks_of(page) if f"class {name}" in block.text]
        (tmp_path / f"{module}.py").write_text(block)
    result = run(tmp_path, python, ROOT / "tests" / "losses" / "trl_steps.py", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout.splitlines()[-1])
    assert all(max(differences) < 1e-6 for differences in steps["apart"].values()), steps
    assert min(steps["size"]) > 0.01 and steps["clipped"][1] > 0.001, steps
    assert min(steps["acts"].values()) > 0.001, steps
    assert [reason.partition("=")[0] for reason in steps["refused"]] == [
        "loss_type",
        "delta",
        "importance_sampling_level",
    ]


@pytest.mark.matrix
def test_uv_run_layers_the_wheel_over_verls_environment_and_leaves_that_as_it_is(tmp_path, underneath, wheel):
    python = make_environment(tmp_path / "environment", underneath, "0.9.1")
    before = packages(python)
    uv = (Path(sys.executable).with_name("uv"), "run", "--no-project", "--python", python)
    # Nothing of the tests' own environment.
    outside = {"PYTHONPATH": "", "UV_CACHE_DIR": str(tmp_path / "cache")}
    composed = ("python", *MAIN, "+clipx=acpo", "--cfg", "job")
    layered = run(tmp_path, *uv, "--with", wheel, *composed, **outside)
    assert layered.returncode == 0 and "loss_mode: clipx_acpo" in layered.stdout, layered.stderr
    code = "import verl, verl.trainer.ppo.core_algos as c; print('clipx_acpo' in c.POLICY_LOSS_REGISTRY)"
    registered = run(tmp_path, *uv, "--with", wheel, "python", "-c", code, **outside)
    assert registered.stdout.split() == ["True"], registered.stderr
    without = run(tmp_path, *uv, *composed, **outside)
    # Without the plugin it is a key that nothing reads.
    assert "\nclipx: acpo\n" in without.stdout and "clipx_acpo" not in without.stdout
    assert packages(python) == before


@pytest.mark.matrix
def test_rays_workers_have_the_wheel_that_uv_run_layers_for_them(python_and_plugin, wheel, tmp_path):
    python, _ = python_and_plugin
    uv = (str(Path(sys.executable).with_name("uv")), "run", "--no-project", "--python", str(python))
    # As verl sets it, so that Ray does not give its workers the command of this process.
    variables = {"PYTHONPATH": "", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "UV_CACHE_DIR": str(tmp_path / "cache")}
    for layers in (("--with", str(wheel)), ()):
        # The prefix of a worker's command, as verl's scripts set it.
        environment = {"py_executable": " ".join([*uv, *layers])}
        task = ("python", "-c", PRINT_LOSSES_OF_A_TASK, repr(environment))
        result = run(tmp_path, *uv, *task, **variables)
        assert result.returncode == 0, result.stderr
        assert ("clipx_acpo" in result.stdout) == bool(layers), result.stdout
