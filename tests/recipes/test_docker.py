"""The images' descriptions, which scripts/test.sh lints by hadolint. Not covered: building them."""

import re
import sys

import pytest
import yaml

from tests.test_dependencies import required

from .shell import ROOT, Machine

DOCKER = ROOT / "docker"


def instructions(name):
    """Instruction and arguments of each, comments dropped, continued lines joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines()]


def arguments(name):
    """The build arguments' defaults."""
    definitions = [rest.partition("=") for instruction, rest in instructions(name) if instruction == "ARG"]
    return {key: value.strip('"') for key, _, value in definitions}


def base(name):
    (image,) = [rest for instruction, rest in instructions(name) if instruction == "FROM"]
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments(name)[match[1]], image)


@pytest.mark.parametrize("name", ["Dockerfile.gpu", "Dockerfile.cpu"])
def test_the_base_is_pinned_and_what_is_run_exists(name):
    image, _, tag = base(name).partition(":")
    assert image and re.search(r"\d", tag) and "latest" not in tag
    scripts = re.findall(r"bash (\S+\.sh)", " ".join(rest for word, rest in instructions(name) if word == "RUN"))
    assert scripts and all((ROOT / script).is_file() for script in scripts)


def test_the_versions_are_the_projects_and_skypilot_starts_from_the_same_base():
    gpu, cpu = ({part.name: part.specifier for part in required(extra)} for extra in ("gpu", "cpu"))
    verl = arguments("Dockerfile.gpu")["VERL_VERSION"]
    assert verl in gpu["verl"] and f"VERL_VERSION=${{VERL_VERSION:-{verl}}}" in (DOCKER / "install.sh").read_text()
    assert arguments("Dockerfile.cpu")["TORCH_VERSION"] in cpu["torch"]
    assert arguments("Dockerfile.cpu")["PYTHON_VERSION"] in ("3.10", "3.11", "3.12")
    task = yaml.safe_load((ROOT / "recipes" / "cluster" / "sky.yaml").read_text())
    assert task["resources"]["image_id"] == f"docker:{base('Dockerfile.gpu')}"


def test_the_installation_refuses_another_environment_and_keeps_torch_and_vllm(tmp_path):
    # -S: without any installed package.
    result = Machine(tmp_path / "bare", python3=f'exec {sys.executable} -S "$@"').run(DOCKER / "install.sh")
    assert result.returncode == 1 and "torch is not installed: this script needs verl's CUDA image" in result.stderr
    versions = 'cat >/dev/null; printf "torch==2.11.0+cu130\\nvllm==0.24.0\\n"; exit'
    machine = Machine(tmp_path / "machine", python3=f'[[ $1 != - ]] || {{ {versions}; }}; cp "$6" "$HOME/constraints"')
    result = machine.run(DOCKER / "install.sh", VERL_VERSION="0.9.1")
    assert result.returncode == 0, result.stderr
    (install,) = [call for call in machine.calls if call[1] == "-m"]
    assert install[1:5] == ["-m", "pip", "install", "--no-cache-dir"] and install[5] == "--constraint"
    assert install[7:] == ["verl==0.9.1", "--editable", ".[gpu]"]
    constraints = (tmp_path / "machine" / "constraints").read_text()
    assert constraints == "torch==2.11.0+cu130\nvllm==0.24.0\n"
