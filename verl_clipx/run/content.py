"""Hashes of what a run reads: models, data, the reward and other files. They tell two runs apart.

Every hash is SHA-256 in hexadecimal, and None where the content cannot be read on this machine.
"""

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

from verl_clipx.common.files import hash_of_file, hash_of_json, read_json

# The file with all weights of a model that is not divided into shards, and for other models the file that says which
# shard has which weights.
ONLY_WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The files that tell models apart besides the weights: with a model's shape, its tokenizer and the sizes of its shards.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    INDEX,
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
# This stands before the hash of a model that the configuration names as the hub does. Such a hash is of the commit's
# id, and not of files.
COMMIT_PREFIX = "commit:"
# The keys by which a file of tools, interactions or agent loops names classes.
KEYS_OF_CLASSES = ("_target_", "class_name")


def hash_of_model(paths: Sequence[str]) -> str | None:
    """Return the hash of a model, with that of its tokenizer if the tokenizer is elsewhere.

    In a folder, the files of `MODEL_FILES` are hashed, and the ends of the files with weights. Of a name on the hub,
    only the commit's id is hashed.

    Args:
        paths: the model's path and, if the tokenizer is elsewhere, the tokenizer's. Each is a local folder, or the name
            of a model on the hub with a commit in this machine's cache.

    Returns:
        The hash, prefixed with `COMMIT_PREFIX` if a path is a name on the hub. None if `paths` is empty, or if a path
        is neither a readable folder with one of `MODEL_FILES` nor a name with a cached commit.
    """
    hashes = [_hash_of_path(path) for path in paths]
    if not hashes or None in hashes:
        return None
    if len(hashes) == 1:
        return hashes[0]
    prefix = ""
    if any(digest.startswith(COMMIT_PREFIX) for digest in hashes):
        prefix = COMMIT_PREFIX
    return prefix + hash_of_json(hashes)


def _hash_of_path(path: str) -> str | None:
    """Return the hash of a single path, as `hash_of_model` has it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        commit = _commit_of_model(path)
        return None if commit is None else COMMIT_PREFIX + hash_of_json(commit)
    files = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    if not files:
        return None
    with contextlib.suppress(OSError):
        hashes: dict[str, Any] = {file.name: hash_of_file(file) for file in files}
        return hash_of_json(hashes | _parts_of_weights(folder))
    return None


def _parts_of_weights(folder: Path) -> dict[str, Any]:
    """Return the size of each file with weights and the hashes of its two ends, by the file's name."""
    files = [path for pattern in WEIGHTS for path in folder.glob(pattern)]
    return {path.name: [path.stat().st_size, *_ends_of(path)] for path in files}


def count_parameters(paths: Sequence[str]) -> int | None:
    """Return how many parameters a model has, counted in the headers of its safetensors files.

    Args:
        paths: as for `hash_of_model`; only the first path, the model's, is read.

    Returns:
        The number of parameters; None if `paths` is empty, or if the model's path is no folder with readable
        safetensors files.
    """
    if not paths:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        files = _weight_files_in(Path(paths[0]).expanduser())
        return sum(map(_count_parameters_in, files)) if files else None
    return None


def _weight_files_in(folder: Path) -> list[Path]:
    """Return those safetensors files of a folder that transformers loads; all of them if none is named as usual.

    A folder may have the weights twice, such as Mistral's, which has consolidated.safetensors too.
    """
    if (folder / ONLY_WEIGHTS).is_file():
        return [folder / ONLY_WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _count_parameters_in(file: Path) -> int:
    """Return the number of parameters in a safetensors file, whose header has the shape of each tensor.

    A safetensors file begins with the length of its header in eight bytes, little-endian. The header follows, as JSON.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{file}: not a safetensors file, whose header never has {length} bytes")
        header = json.loads(content.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _commit_of_model(name: str) -> str | None:
    """Return the id of the commit that this machine's cache has of a model on the hub; None if it has none."""
    from huggingface_hub import try_to_load_from_cache

    # The hub's library raises a ValueError for a text that cannot be a name on the hub.
    with contextlib.suppress(ValueError):
        for file in MODEL_FILES:
            cached = try_to_load_from_cache(name, file)
            if isinstance(cached, str):
                parts = Path(cached).parts
                return parts[parts.index("snapshots") + 1]
    return None


def hash_of_data(paths: Sequence[str]) -> str | None:
    """Return the hash of data files, which depends on their order; None if there are no files, or one is unreadable."""
    files = [Path(path).expanduser() for path in paths]
    if not files or not all(file.is_file() for file in files):
        return None
    with contextlib.suppress(OSError):
        return hash_of_json([hash_of_file(file) for file in files])
    return None


def hash_of_checkpoint(folder: Path) -> str | None:
    """Return the hash of a checkpoint: of the names, the sizes and the two ends of its files.

    torch writes the checksums of all tensors at the end of a file, so that the end tells weights apart.

    Returns:
        The hash; None if the folder is unreadable, or has no file.
    """
    with contextlib.suppress(OSError):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        parts = {path.relative_to(folder).as_posix(): [path.stat().st_size, *_ends_of(path)] for path in files}
        return hash_of_json(parts) if parts else None
    return None


def _ends_of(path: Path) -> list[str]:
    """Return the hashes of the first and of the last `PART` bytes of a file."""
    with path.open("rb") as file:
        first = file.read(PART)
        file.seek(max(path.stat().st_size - PART, 0))
        last = file.read(PART)
    return [hashlib.sha256(part).hexdigest() for part in (first, last)]


def hash_of_reward(path: str | None) -> str | None:
    """Return the hash of the file with a reward function.

    Args:
        path: the path as verl takes it: of a file, perhaps after file://, or of a module, after pkg://.

    Returns:
        The hash; None without a path, or if there is no such file.
    """
    if path and path.startswith("pkg://"):
        module = find_spec(path.removeprefix("pkg://").replace("/", "."))
        path = None if module is None else module.origin
    if not path:
        return None
    file = Path(path.removeprefix("file://")).expanduser()
    return hash_of_file(file) if file.is_file() else None


def hash_of_named(path: str) -> str | None:
    """Return the hash of what another key of the configuration names: a file of code or of YAML, or a model.

    The hash of a YAML file, such as one of tools or of agent loops, includes the source files of the classes that it
    names, except verl's own classes.

    Args:
        path: the key's value, as for `hash_of_reward` or as a path of `hash_of_model`.

    Returns:
        The hash, for a model as `hash_of_model` returns it. None if nothing at `path` is readable, or if the source of
        a class is not found.
    """
    with contextlib.suppress(OSError, ImportError, ValueError, yaml.YAMLError):
        file = Path(path.removeprefix("file://")).expanduser()
        if file.is_dir():
            return hash_of_model([path]) or hash_of_checkpoint(file)
        digest = hash_of_reward(path)
        if digest is None:
            return hash_of_model([path])
        if file.suffix not in (".yaml", ".yml"):
            return digest
        sources = [source_of(name) for name in classes_in(yaml.safe_load(file.read_text()))]
        if None in sources:
            return None
        if not sources:
            return digest
        return hash_of_json([digest, *(hash_of_file(source) for source in sources)])
    return None


def classes_in(content: Any) -> Iterator[str]:
    """Yield the classes that the content of a YAML file names, as package.module.Class, except verl's own."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key in KEYS_OF_CLASSES and isinstance(value, str) and not value.startswith("verl."):
                yield value
            else:
                yield from classes_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from classes_in(value)


def source_of(name: str) -> Path | None:
    """Return the file of the module that has a class, without importing the module; None if there is no such file.

    Args:
        name: the class, as package.module.Class.
    """
    names = name.split(".")
    if len(names) < 2 or "" in names:
        return None
    *packages, module = names[:-1]
    # The folders in which the next part of the name is looked up; None stands for sys.path.
    folders: Sequence[str] | None = None
    for package in packages:
        # The finder wants only the last part of a package's or a module's name.
        spec = PathFinder.find_spec(package, folders)
        if spec is None or spec.submodule_search_locations is None:
            return None
        folders = [*spec.submodule_search_locations]
    spec = PathFinder.find_spec(module, folders)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file if file.is_file() else None
