"""Hashes of what a run reads: its model, its data and its reward, by which two runs are told apart."""

import contextlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from verl_clipx.common.files import hash_of_file, hash_of_json

# What tells models apart without reading their weights: their shape, the sizes of their shards and their tokenizer.
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


def hash_of_model(path: str | None) -> str | None:
    """Returns the hash of a model's configuration, index and tokenizer.

    Args:
        path: a folder, or a name on the hub whose files are in this machine's cache.

    Returns:
        SHA-256 in hexadecimal; None if none of the files is here.
    """
    if not path:
        return None
    found = {name: file for name in OF_A_MODEL if (file := _file_of_model(path, name)) is not None}
    with contextlib.suppress(OSError):
        return hash_of_json({name: hash_of_file(file) for name, file in found.items()}) if found else None
    return None


def _file_of_model(path: str, name: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    # A path that is no name on the hub is refused.
    with contextlib.suppress(ValueError):
        cached = try_to_load_from_cache(path, name)
        return Path(cached) if isinstance(cached, str) else None
    return None


def hash_of_data(paths: Sequence[str]) -> str | None:
    """Returns the hash of data files in their order; None without any, or if one can't be read here."""
    files = [Path(path).expanduser() for path in paths]
    if not files or not all(file.is_file() for file in files):
        return None
    with contextlib.suppress(OSError):
        return hash_of_json([hash_of_file(file) for file in files])
    return None


def hash_of_reward(path: str | None) -> str | None:
    """Returns the hash of the file of a reward function.

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
    file = Path(path.removeprefix("file://"))
    return hash_of_file(file) if file.is_file() else None
