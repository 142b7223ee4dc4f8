"""The versions of verl that this plugin extends: its workers and trainers change between minor versions."""

import sys
from importlib import metadata

from packaging.specifiers import SpecifierSet

VERL_RANGE = SpecifierSet(">=0.9.0,<0.10")


def unsuitable_verl() -> str | None:
    """One line that says which verl is missing or here instead; None if a suitable one is here."""
    # A checkout that is imported wins over what is installed.
    version = getattr(sys.modules.get("verl"), "__version__", None)
    try:
        version = version or metadata.version("verl")
    except metadata.PackageNotFoundError:
        return f"verl-clipx needs verl{VERL_RANGE}, and no verl is installed: pip install 'verl{VERL_RANGE}'"
    if VERL_RANGE.contains(version, prereleases=True):
        return None
    return f"verl-clipx needs verl{VERL_RANGE}, and this is verl {version}: pip install 'verl{VERL_RANGE}'"
