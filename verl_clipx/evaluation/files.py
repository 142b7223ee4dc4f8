"""What identifies the content of files."""

import hashlib
import json
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def hash_of_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of_folder(folder: Path) -> str:
    """SHA-256 over the name, size, first and last MiB of every file directly in a folder, hidden ones left out.

    Not a proof of equality, but weights of two training steps differ in every part, and a model of 15 GB takes no time.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}\x1f{size}\x1f".encode())
        with path.open("rb") as file:
            digest.update(file.read(_CHUNK_BYTES))
            file.seek(max(0, size - _CHUNK_BYTES))
            digest.update(file.read(_CHUNK_BYTES))
    return digest.hexdigest()
