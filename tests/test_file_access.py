"""Every file that the package writes goes through verl_clipx/common/files.py, or has a reason not to; by names of
calls. Not covered: what libraries write, such as a model's save_pretrained, Hydra's own files, and verl.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl_clipx"

# Calls that open, write or replace a file: `open`, methods of a path, a table or a figure, functions of modules.
CALL = re.compile(
    r"(?<![\w.])open\(|\.(?:open|write_text|write_bytes|to_csv|to_json|to_parquet|to_pickle|to_excel|savefig|savez|save"
    r"|dump|write_table|ParquetWriter|symlink_to|hardlink_to)\("
    # Not a table's columns.
    r"|\.rename\((?!columns=)"
    r"|\b(?:shutil\.(?:copy\w*|move)|os\.(?:fdopen|rename|replace|link|symlink))\("
)
# `replacing` of files.py gives a file of this name to write to.
PARTIAL = re.compile(r"\bpartial\b")
TEMPORARY = "in a temporary folder of the command's own"
LOCK = "a lock, of which nothing is read"
EXCEPTIONS = [
    ("run/run_lock.py", ".open(", LOCK),
    ("run/run_lock.py", ".open(", LOCK),
    ("common/terminal.py", "open(", "the null device"),
    ("common/terminal.py", ".open(", "the null device"),
    ("analysis/demo/files.py", "shutil.copyfile(", "the finished runs, which the same command copies again"),
    ("papers/evaluation/checkpoints.py", ".open(", "read in parts of a fixed size"),
    ("papers/evaluation/validation_run.py", ".open(", "a log that grows while a process runs"),
    *[("run/content.py", ".open(", "read in parts of a fixed size")] * 2,
    ("run/explaining.py", "open(", TEMPORARY),
    *[("run/explain.py", call, TEMPORARY) for call in (".write_text(", ".write_text(", "shutil.copy(")],
    *[("run/explain.py", ".open(", TEMPORARY)] * 2,
    *[("run/stand_in.py", call, TEMPORARY) for call in (".open(", ".write_text(", ".write_text(")],
    ("run/slurm.py", ".open(", "the first two bytes are read"),
    ("run/without_plugin.py", "open(", TEMPORARY),
    ("training/trainer/log.py", ".open(", "a log that grows while a process runs"),
]


def accesses(source: str) -> list[str]:
    """Every call that opens, writes or replaces a file past files.py."""
    lines = [line.partition("  # ")[0] for line in source.splitlines()]
    return [call[0] for line in lines if not PARTIAL.search(line) for call in CALL.finditer(line)]


def test_files_are_written_whole():
    calls = [
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "common" / "files.py"
        for call in accesses(path.read_text(encoding="utf-8"))
    ]
    plugin_of_hydra = [call for path in ROOT.glob("hydra_plugins/**/*.py") for call in accesses(path.read_text())]
    assert plugin_of_hydra == []
    known = [(file, call) for file, call, _ in EXCEPTIONS]
    assert sorted(calls) == sorted(known), "use verl_clipx/common/files.py, or say why not"


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        ("shutil.copytree(a, b)", ["shutil.copytree("]),
        ("os.replace(a, b)", ["os.replace("]),
        ("with os.fdopen(3) as file:", ["os.fdopen("]),
        ("path.rename(other)", [".rename("]),
        ('path.write_text("x")  # not partial', [".write_text("]),
        ("partial.write_text(text)", []),
        ("table.rename(columns=names)", []),
    ],
)
def test_each_way_to_write_is_seen(line, calls):
    assert accesses(line) == calls
