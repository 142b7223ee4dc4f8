"""Installing the plugin beside another verl leaves that verl, by the index's metadata alone; with `-m matrix` it moves
no package of verl's own GPU extras, as of today and of the day after verl's release. Not covered: whether the
environment works, and an environment with other extras or of another platform.
"""

import ast
import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from verl_clipx.common.extras import TOOLS

ROOT = Path(__file__).parents[1]

# It came out the day before 2026-09-21.
VERL = "verl[vllm,fsdp,math]==0.9.1"


def pip_settings() -> dict[str, list[str]]:
    """Where pip finds packages here; uv does not read pip's configuration."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    # Lines such as global.index-url='…' or :env:.index-url='…'. What comes later in this order wins.
    settings: dict[str, dict[str, list[str]]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in settings:
            settings[section][name] = ast.literal_eval(value).split()
    return settings["global"] | settings["install"] | settings[":env:"]


def configuration_of_uv(settings: dict[str, list[str]]) -> str:
    """A configuration for uv that takes the same versions from the same places as pip with these settings."""
    default = settings.get("index-url", [])
    lines = ['index-strategy = "unsafe-best-match"']
    for url in [*settings.get("extra-index-url", []), *default]:
        lines += ["[[index]]", f'url = "{url}"', f"default = {str(url in default).lower()}"]
        # The resolutions of one test run see the same packages, and only the first asks for them.
        lines += ['cache-control = { api = "max-age=900", files = "max-age=900" }']
    return "\n".join(lines) + "\n"


def resolve(folder: Path, *requirements: str, day: str = "") -> dict[str, str]:
    """The version of each package that these requirements would install on a GPU machine, but for this project, of what
    was published until a day. uv's configuration goes to the folder.
    """
    configuration = folder / "uv.toml"
    settings = pip_settings()
    configuration.write_text(configuration_of_uv(settings))
    trusted = {"SSL_CERT_FILE": settings["cert"][0]} if settings.get("cert") else {}
    platform = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command = [find_uv_bin(), "--config-file", str(configuration), "pip", "compile", *platform]
    command += ["--python", sys.executable, "--quiet", "--no-header", "--no-annotate"]
    if day:
        command += ["--exclude-newer", day]
    result = subprocess.run(
        [*command, "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        env=trusted | os.environ,
    )
    assert result.returncode == 0, (
        f"uv could not resolve {', '.join(requirements)}. This test needs the package index that `pip config list` "
        f"names, the public one if it names none. uv says:\n{result.stderr}"
    )
    lines = [line for line in result.stdout.splitlines() if not line.startswith("verl-clipx @")]
    return dict(line.split("==") for line in lines)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("day", [pytest.param("", id="today"), pytest.param("2026-09-21", id="at verl's release")])
def test_the_plugin_adds_nothing_to_verls_environment_and_with_its_tools_moves_nothing(day, tmp_path):
    versions = resolve(tmp_path, VERL, day=day)
    pins = {"verl": "0.9.1", "vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0", "flash-attn": "2.8.3"}
    assert versions.items() >= pins.items() and len(versions) > 200
    assert resolve(tmp_path, VERL, f"verl-clipx @ {ROOT.as_uri()}", day=day) == versions
    with_tools = resolve(tmp_path, VERL, f"verl-clipx[gpu] @ {ROOT.as_uri()}", day=day)
    assert {name: with_tools.get(name) for name in versions} == versions
    assert {canonicalize_name(name) for name in TOOLS.values()} <= with_tools.keys()


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "[tools]"])
def test_another_verl_stays_as_it_is(tmp_path, extra):
    assert resolve(tmp_path, "verl==0.8.0", f"verl-clipx{extra} @ {ROOT.as_uri()}")["verl"] == "0.8.0"


def required(extra: str = "") -> list[Requirement]:
    """What the installed project requires, of one extra or without any."""
    parts = map(Requirement, requires("verl-clipx"))
    return [part for part in parts if (part.marker.evaluate({"extra": extra}) if part.marker else not extra)]


def test_only_the_extras_require_verl_and_only_verl_has_an_upper_end():
    own, tools, cpu, gpu = (required(extra) for extra in ("", "tools", "cpu", "gpu"))
    # Only the extras require verl, and only a known break has an upper end: pyproject.toml says what breaks.
    assert "verl" not in {part.name for part in own}
    for extra in (cpu, gpu):
        (verl,) = [part for part in extra if part.name == "verl"]
        assert verl.specifier.contains("0.9.1") and not verl.specifier.contains("0.10")
    with_upper_end = {
        part.name for part in [*own, *tools, *gpu] if any(bound.operator != ">=" for bound in part.specifier)
    }
    assert with_upper_end == {"verl"}
    assert {part.name for part in tools} == set(TOOLS.values())
    for names in ({part.name for part in extra} for extra in (cpu, gpu, required("dev"))):
        # A build backend may leave verl-clipx[tools] as it is, or write what it stands for.
        assert "verl-clipx" in names or set(TOOLS.values()) <= names
