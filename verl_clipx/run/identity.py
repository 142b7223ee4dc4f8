"""What the processes of a run must have in common: hashes of the settings, of the package, and of a loss of one's own.

The driver's hashes are handed to the workers, and each worker compares them with its own.
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

# The keys of the clipx node that do not change what is trained.
LEFT_OUT = ("trace", "receipt", "log", "health", "metrics", "missing_state")
# By name of a hash, the message if a worker has another hash than the driver.
DIFFERENCES = {
    "settings": "the settings of the clipx node are others",
    "package": "the files of verl_clipx are others: install the same version on every node",
    "function": "the source of clipx.function is another: copy the same file to every node",
}


def identity_of(settings: Any) -> dict[str, str]:
    """Return the hashes of a run by name.

    They are of the settings, of the package's files, and of the source of a method of the user's own, an empty text
    without such a method.

    Args:
        settings: the clipx node, built and complete.
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
    """Return a message for each hash that differs in a worker.

    Args:
        driver: the driver's hashes by name. A hash that it lacks is not compared.
        worker: the worker's hashes by name.
    """
    return [DIFFERENCES[name] for name, own in worker.items() if driver.get(name, own) != own]


def own_sources(settings: Any) -> list[Path]:
    """Return the files with the classes of a method of the user's own, in a fixed order; empty without such a method.

    Args:
        settings: the clipx node, built.
    """
    modules = {kind.__module__ for kind in type(getattr(settings, "method", None)).__mro__}
    # In a worker `__main__` is Ray's own.
    known = {"verl_clipx", "__main__", *sys.stdlib_module_names}
    foreign = sorted(name for name in modules if name.partition(".")[0] not in known)
    files = []
    for name in foreign:
        try:
            source = inspect.getsourcefile(sys.modules[name])
        except (KeyError, TypeError):
            # A module without a file, such as a notebook's.
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
    """Return the first 128 bits of the SHA-256 of byte strings, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()[:32]
