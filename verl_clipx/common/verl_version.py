"""Finds installed versions, and says which of verl this plugin extends: verl changes between minor versions."""

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

VERL_RANGE = SpecifierSet(">=0.9.0,<0.10")


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def verl_version() -> str | None:
    """Returns the version of the verl that Python would import, without importing it; None if there is none."""
    if "verl" in sys.modules:
        return sys.modules["verl"].__version__
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    # A checkout on Python's path wins over what is installed.
    file = Path(spec.origin).with_name("version") / "version"
    return file.read_text().strip() if file.is_file() else metadata.version("verl")


def unsuitable_verl() -> str | None:
    """Returns one line that says which verl is missing or here instead; None if a suitable one is here."""
    version = verl_version()
    if version is not None and VERL_RANGE.contains(version, prereleases=True):
        return None
    found = "no verl is installed" if version is None else f"this is verl {version}"
    return f"verl-clipx needs verl{VERL_RANGE}, and {found}: pip install 'verl{VERL_RANGE}'"
