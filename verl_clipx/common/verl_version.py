"""Finds installed versions, and decides whether the plugin extends the verl that is here.

The plugin extends the releases that its tests run on. It extends any other verl of their minor version or a later one
if every name that it relies on is there with the signature that it needs (verl_contract.py). A run then says that its
verl is not a release that tests ran on.
"""

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_clipx.common.verl_contract import changes_in

# What pip is told to install.
VERL_RANGE = SpecifierSet(">=0.9.0,<0.10")
TESTED_RELEASES = ("0.9.0", "0.9.1")


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def verl_folder() -> Path | None:
    """Return the folder of the verl that Python would import, without importing it; None if there is none."""
    if "verl" in sys.modules:
        return Path(sys.modules["verl"].__file__).parent
    spec = find_spec("verl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def verl_version() -> str | None:
    """Return the version of the verl that Python would import, without importing it; None if there is none."""
    if "verl" in sys.modules:
        return sys.modules["verl"].__version__
    folder = verl_folder()
    if folder is None:
        return None
    # A checkout on Python's path wins over what is installed.
    file = folder / "version" / "version"
    if file.is_file():
        return file.read_text().strip()
    return installed_version("verl")


def version_here(distribution: str) -> str | None:
    """Return the version of a distribution that Python would import; None if it would find none.

    A checkout of verl on Python's path comes before a verl that is installed.
    """
    return verl_version() if distribution == "verl" else installed_version(distribution)


def is_tested(version: str) -> bool:
    """Return whether tests ran on a version of verl; a local label in it, such as `+cu128`, does not matter."""
    return Version(version).public in TESTED_RELEASES


def unsuitable_verl() -> str | None:
    """Return one line that says why the plugin does nothing with the installed verl; None if it extends that verl."""
    version = verl_version()
    if version is None:
        return f"verl-clipx needs verl{VERL_RANGE}, and no verl is installed: pip install 'verl{VERL_RANGE}'"
    if is_tested(version):
        return None
    if Version(version).release < Version(TESTED_RELEASES[0]).release:
        return f"verl-clipx needs verl{VERL_RANGE}, and this is verl {version}: pip install 'verl{VERL_RANGE}'"
    changes = changes_in(verl_folder())
    if not changes:
        return None
    return (
        f"verl-clipx does nothing beside this verl {version}, which has changed what the plugin relies on: "
        f"{'; '.join(changes)}. Run pip install 'verl{VERL_RANGE}', or install a verl-clipx that knows this verl"
    )


def untested_verl() -> str | None:
    """Return one line that says that no test ran on the installed verl, which the plugin extends.

    None is returned if tests ran on it, or if the plugin does not extend it.
    """
    version = verl_version()
    if version is None or is_tested(version):
        return None
    if unsuitable_verl() is not None:
        return None
    return (
        f"this is verl {version}, not a release that the tests of verl-clipx ran on ({' and '.join(TESTED_RELEASES)}); "
        "the names that the plugin relies on are there, with the signatures that it needs"
    )
