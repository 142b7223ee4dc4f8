"""Finds the Hydra groups: inside the package in a wheel, next to it in a checkout or an editable install."""

from pathlib import Path


def configs_folder() -> Path:
    """Return the folder of the Hydra groups.

    Raises:
        FileNotFoundError: there is none, because the installation is not complete.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "clipx").is_dir():
            return folder
    raise FileNotFoundError(f"there is no configs/clipx in {package} or {package.parent}. Install verl-clipx again.")
