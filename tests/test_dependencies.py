"""Installing the plugin into a working verl environment moves no package of it.

Covers: verl's own GPU extras, resolved without and with this project, as of today and of the day after verl's release;
where upper ends are allowed. The package index is asked for metadata alone: nothing is installed, and nothing is
downloaded but the two packages without a wheel (flash-attn's sources, 8 MB, bring their metadata and are not built).
Not covered: whether the environment works, and an environment with other extras or of another platform.
"""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from verl_clipx.common.extras import TOOLS

ROOT = Path(__file__).parents[1]

VERL = "verl[vllm,fsdp,math]==0.9.1"

# As of which day: the newest of all packages, and those of the day after verl 0.9.1 came out.
DAYS = ["", "2026-09-21"]


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
    """The version of each package that these requirements would install on a GPU machine.

    Args:
        folder: for uv's configuration.
        requirements: what to install.
        day: leave out what was published later; empty for none.

    Returns:
        Version by name; this project is not in it.
    """
    configuration = folder / "uv.toml"
    settings = pip_settings()
    configuration.write_text(configuration_of_uv(settings))
    certificates = settings.get("cert")
    trusted = {"SSL_CERT_FILE": certificates[0]} if certificates else {}
    platform = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command = [find_uv_bin(), "--config-file", str(configuration), "pip", "compile", *platform]
    command += ["--python", sys.executable, "--quiet", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, *(["--exclude-newer", day] if day else []), "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        env={**trusted, **os.environ},
    )
    assert done.returncode == 0, (
        f"uv could not resolve {', '.join(requirements)}. This test needs the package index that `pip config list` "
        f"names, the public one if it names none. uv says:\n{done.stderr}"
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("verl-clipx @")]
    return dict(line.split("==") for line in lines)


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    """verl's own GPU environment by day. Both at once: resolving is mostly waiting for the index."""
    folders = [tmp_path_factory.mktemp("verl") for _ in DAYS]
    with ThreadPoolExecutor() as threads:
        resolved = threads.map(lambda folder, day: resolve(folder, VERL, day=day), folders, DAYS)
        return dict(zip(DAYS, resolved, strict=True))


@pytest.fixture(params=DAYS, ids=["today", "at verl's release"])
def environment(request, environments):
    """The day, and verl's own GPU environment."""
    return request.param, environments[request.param]


@pytest.mark.slow
def test_the_environment_is_verls(environment):
    _, versions = environment
    pins = {"verl": "0.9.1", "vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0", "flash-attn": "2.8.3"}
    assert versions.items() >= pins.items()
    assert len(versions) > 200


@pytest.mark.slow
def test_the_plugin_alone_adds_and_moves_nothing(environment, tmp_path):
    day, versions = environment
    assert resolve(tmp_path, VERL, f"verl-clipx @ {ROOT.as_uri()}", day=day) == versions


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "[tools]"])
def test_another_verl_stays_as_it_is(tmp_path, extra):
    assert resolve(tmp_path, "verl==0.8.0", f"verl-clipx{extra} @ {ROOT.as_uri()}")["verl"] == "0.8.0"


@pytest.mark.slow
def test_the_tools_move_nothing(environment, tmp_path):
    day, versions = environment
    with_tools = resolve(tmp_path, VERL, f"verl-clipx[gpu] @ {ROOT.as_uri()}", day=day)
    assert {name: with_tools.get(name) for name in versions} == versions
    assert {canonicalize_name(name) for name in TOOLS.values()} <= with_tools.keys()


@pytest.mark.slow
def test_an_upper_end_that_moves_a_package_is_seen(environments, tmp_path):
    # What the tests above are for: as if this project asked for an older numpy than vLLM takes.
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "verl-clipx"\nversion = "0"\ndependencies = ["numpy<2.3"]\n')
    moved = resolve(tmp_path, VERL, f"verl-clipx @ {tmp_path.as_uri()}")
    assert moved["numpy"] != environments[""]["numpy"]


def required(extra: str = "") -> list[Requirement]:
    """What the installed project requires, of one extra or without any."""
    parts = map(Requirement, requires("verl-clipx"))
    return [part for part in parts if (part.marker.evaluate({"extra": extra}) if part.marker else not extra)]


def test_what_the_project_requires():
    own, tools, cpu, gpu = (required(extra) for extra in ("", "tools", "cpu", "gpu"))
    # Only the extras require verl, and only a known break has an upper end: pyproject.toml says what breaks.
    assert "verl" not in {part.name for part in own}
    for extra in (cpu, gpu):
        (verl,) = [part for part in extra if part.name == "verl"]
        assert verl.specifier.contains("0.9.1") and not verl.specifier.contains("0.10")
    ended = [part.name for part in [*own, *tools, *gpu] if any(end.operator != ">=" for end in part.specifier)]
    assert set(ended) == {"verl"}
    assert {part.name for part in tools} == set(TOOLS.values())
    for names in ({part.name for part in extra} for extra in (cpu, gpu, required("dev"))):
        # A build backend may leave verl-clipx[tools] as it is, or write what it stands for.
        assert "verl-clipx" in names or set(TOOLS.values()) <= names
