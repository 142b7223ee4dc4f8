"""Hashes of what a run reads: models, data, the reward and other files, by which two runs are told apart."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from verl_clipx.common.files import hash_of_file, hash_of_json

# What tells models apart beside their weights: their shape, the sizes of their shards and their tokenizer.
OF_A_MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)

WEIGHTS = ("*.safetensors", "*.bin")
# The bytes that are read at each end of a file with weights.
PART = 1 << 20
# The most bytes that safetensors itself reads as a header.
LONGEST_HEADER = 100_000_000
# A model that is named by its name on the hub has this before its hash, which is of a commit and not of files.
OF_COMMIT = "commit:"
# The keys by which a file of tools, interactions or agent loops names classes.
NAMES_CLASS = ("_target_", "class_name")


def hash_of_model(paths: Sequence[str]) -> str | None:
    """Return the hash of a model's configuration, index and tokenizer, and of parts of its weights.

    Args:
        paths: of the model and, if it is elsewhere, of its tokenizer: a folder, or a name on the hub whose commit is in
            this machine's cache.

    Returns:
        SHA-256 in hexadecimal, after `OF_COMMIT` if a path is a name on the hub; None without a path, or if nothing
        tells what one of them is.
    """
    hashes = [_hash_of_folder(path) for path in paths]
    if not hashes or None in hashes:
        return None
    if len(hashes) == 1:
        return hashes[0]
    kind = OF_COMMIT if any(digest.startswith(OF_COMMIT) for digest in hashes) else ""
    return kind + hash_of_json(hashes)


def _hash_of_folder(path: str) -> str | None:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        commit = _commit_of_model(path)
        return None if commit is None else OF_COMMIT + hash_of_json(commit)
    files = [folder / name for name in OF_A_MODEL if (folder / name).is_file()]
    if not files:
        return None
    with contextlib.suppress(OSError):
        hashes: dict[str, Any] = {file.name: hash_of_file(file) for file in files}
        return hash_of_json(hashes | _parts_of_weights(folder))
    return None


def _parts_of_weights(folder: Path) -> dict[str, Any]:
    """Return the sizes of a model's weights with hashes of their ends, by file."""
    files = [path for pattern in WEIGHTS for path in folder.glob(pattern)]
    return {path.name: [path.stat().st_size, *_ends_of(path)] for path in files}


def count_parameters(paths: Sequence[str]) -> int | None:
    """Return how many parameters a model has, by the headers of its files of weights.

    Args:
        paths: as for `hash_of_model`; the first one is the model.

    Returns:
        None without a path, or if it is no folder with readable safetensors.
    """
    if not paths:
        return None
    files = sorted(Path(paths[0]).expanduser().glob("*.safetensors"))
    if not files:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return sum(map(_parameters_in, files))
    return None


def _parameters_in(file: Path) -> int:
    """Return the number of parameters in a file, whose header has the shape of each tensor.

    Source: the format of safetensors: the length of the header in eight bytes, little-endian, then the header as JSON.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{file}: a header of {length} bytes is not one of a safetensors file")
        header = json.loads(content.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _commit_of_model(name: str) -> str | None:
    """Return the commit that this machine's cache has of a model on the hub; None if it has none."""
    from huggingface_hub import try_to_load_from_cache

    # What is no name on the hub is refused.
    with contextlib.suppress(ValueError):
        for file in OF_A_MODEL:
            cached = try_to_load_from_cache(name, file)
            if isinstance(cached, str):
                parts = Path(cached).parts
                return parts[parts.index("snapshots") + 1]
    return None


def hash_of_data(paths: Sequence[str]) -> str | None:
    """Return the hash of data files in their order; None without any, or if one can't be read here."""
    files = [Path(path).expanduser() for path in paths]
    if not files or not all(file.is_file() for file in files):
        return None
    with contextlib.suppress(OSError):
        return hash_of_json([hash_of_file(file) for file in files])
    return None


def hash_of_checkpoint(folder: Path) -> str | None:
    """Return the hash of a checkpoint's files: their names and sizes, and of each its first and its last part.

    The end of a file of torch's has the checksums of all its tensors, so that it tells weights apart without reading
    them.

    Returns:
        SHA-256 in hexadecimal; None if the folder can't be read here, or has no file.
    """
    with contextlib.suppress(OSError):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        parts = {path.relative_to(folder).as_posix(): [path.stat().st_size, *_ends_of(path)] for path in files}
        return hash_of_json(parts) if parts else None
    return None


def _ends_of(path: Path) -> list[str]:
    """Return the hashes of the first and of the last part of a file."""
    with path.open("rb") as file:
        first = file.read(PART)
        file.seek(max(path.stat().st_size - PART, 0))
        last = file.read(PART)
    return [hashlib.sha256(part).hexdigest() for part in (first, last)]


def hash_of_reward(path: str | None) -> str | None:
    """Return the hash of the file of a reward function.

    Args:
        path: as verl takes it, with file:// or pkg:// before it or not.

    Returns:
        SHA-256 in hexadecimal; None without a path, or if the file can't be found here.
    """
    if path and path.startswith("pkg://"):
        module = find_spec(path.removeprefix("pkg://").replace("/", "."))
        path = module and module.origin
    if not path:
        return None
    file = Path(path.removeprefix("file://")).expanduser()
    return hash_of_file(file) if file.is_file() else None


def hash_of_named(path: str) -> str | None:
    """Return the hash of what another key names: a file of code, of tools or of agent loops, or a model.

    A file of YAML counts with the sources of the classes that it names, those of verl apart.

    Returns:
        As `hash_of_model` for a folder with a model and for a name on the hub, otherwise SHA-256 in hexadecimal; None
        if it, or the source of a class, can't be read here.
    """
    with contextlib.suppress(OSError, ImportError, ValueError, yaml.YAMLError):
        place = Path(path.removeprefix("file://")).expanduser()
        if place.is_dir():
            return hash_of_model([path]) or hash_of_checkpoint(place)
        digest = hash_of_reward(path)
        if digest is None:
            return hash_of_model([path])
        if place.suffix not in (".yaml", ".yml"):
            return digest
        sources = [source_of(name) for name in classes_in(yaml.safe_load(place.read_text()))]
        if None in sources:
            return None
        return hash_of_json([digest, *(hash_of_file(source) for source in sources)]) if sources else digest
    return None


def classes_in(content: Any) -> Iterator[str]:
    """Yield the names of classes, as package.module.Class, in what a file of YAML holds, without those of verl."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key in NAMES_CLASS and isinstance(value, str) and not value.startswith("verl."):
                yield value
            else:
                yield from classes_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from classes_in(value)


def source_of(name: str) -> Path | None:
    """Return the file of the module of a class, without importing it; None if it is not found here."""
    *packages, module, _ = ("", *name.split("."))
    places: Sequence[str] | None = None
    for package in filter(None, packages):
        spec = PathFinder.find_spec(package, places)
        if spec is None or spec.submodule_search_locations is None:
            return None
        places = [*spec.submodule_search_locations]
    # The finder compares only the last part of a name.
    spec = PathFinder.find_spec(module, places) if module else None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None
