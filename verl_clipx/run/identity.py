"""What the processes of a run must have in common: hashes of the settings, of the package, and of a loss of one's own.

The driver's go with the run, and each worker compares its own.
"""

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import verl_clipx

# What does not change what is trained.
LEFT_OUT = ("trace", "receipt", "log", "health", "metrics", "missing_state")
# What a hash is of, in the words of a message.
NAMES = {
    "settings": "the settings of the clipx node are others",
    "package": "the files of verl_clipx are others: install the same version on every node",
    "function": "the source of clipx.function is another: copy the same file to every node",
}


def identity_of(settings: Any) -> dict[str, str]:
    """Return a hash of the settings, of the package's files and of the source of a method that is not the package's.

    Args:
        settings: the clipx node as it is built, with what it gets from the run.
    """
    trained = {name: value for name, value in dataclasses.asdict(settings).items() if name not in LEFT_OUT}
    kinds = [type(getattr(settings, name)).__qualname__ for name in sorted(trained)]
    files = own_sources(settings)
    return {
        "settings": digest([repr(sorted(trained.items())).encode(), repr(kinds).encode()]),
        "package": package_digest(),
        "function": digest(path.read_bytes() for path in files) if files else "",
    }


def differences_from(driver: Mapping[str, str], worker: Mapping[str, str]) -> list[str]:
    """Return in words what is another in a worker than in the driver; nothing about what the driver did not say."""
    return [NAMES[name] for name, own in worker.items() if driver.get(name, own) != own]


def own_sources(settings: Any) -> list[Path]:
    """Return the files of the classes of a method that are neither the package's nor Python's, in a fixed order."""
    modules = {kind.__module__ for kind in type(getattr(settings, "method", None)).__mro__}
    # In a worker `__main__` is Ray's own.
    known = {"verl_clipx", "__main__", *sys.stdlib_module_names}
    foreign = sorted(name for name in modules if name.partition(".")[0] not in known)
    files = []
    for name in foreign:
        try:
            source = inspect.getsourcefile(sys.modules[name])
        except (KeyError, TypeError):
            # A module without a file, as of a notebook.
            source = None
        if source is not None and Path(source).is_file():
            files.append(Path(source))
    return files


@cache
def package_digest() -> str:
    """Return a hash of the names and contents of the package's Python files."""
    folder = Path(verl_clipx.__file__).parent
    files = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix())
    return digest(part for path in files for part in (path.relative_to(folder).as_posix().encode(), path.read_bytes()))


def digest(parts: Iterable[bytes]) -> str:
    """Return a hash of byte strings, hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()[:32]
