"""The files of `clipx demo`, which come with the package: they are copied, and need neither torch nor verl."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from verl_clipx.common.extras import OF_RUNS, pip_command

SHIPPED = Path(__file__).parent / "shipped"
RUNS, PAGE = ("grpo-seed1", "acpo-seed1"), "report.html"


def write_demo(out: Path) -> None:
    """Write the two runs and their page into a folder, which may have them already.

    Raises:
        ValueError: something else stands where the folder or one of the files would be written.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file. Give --out a folder for the page and the runs.")
    names = sorted(path.relative_to(SHIPPED) for path in SHIPPED.rglob("*") if path.is_file())
    for name in names:
        if (out / name).exists() and (out / name).read_bytes() != (SHIPPED / name).read_bytes():
            raise ValueError(f"{out / name}: already exists, and this demo did not write it. Choose another --out.")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SHIPPED / name, out / name)


def _first() -> str:
    missing = [name for module, name in OF_RUNS.items() if find_spec(module) is None]
    return f", after {pip_command(missing)}" if missing else ""


def describe(out: Path) -> str:
    """Say what was written, and what to type next."""
    grpo, acpo = (out / run for run in RUNS)
    return f"""{out / PAGE}: what clipping did to the tokens of two small runs, GRPO and ACPO.
Each trained a policy of about a million parameters for 8 steps on two CPU cores, with seed 1. Try next{_first()}:
  clipx diagnose {acpo}
  clipx replay {grpo} +clipx=dapo
  clipx report {grpo} {acpo} --out {out / "page"}"""
