"""Every file that the package writes goes through verl_clipx/common/files.py, or has a reason not to; by names of
calls. Not covered: what libraries write, such as a model's save_pretrained, Hydra's own files, and verl.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "verl_clipx"

# Calls that open or write a file: Python's `open`, methods of a path, a table or a figure, and functions of modules.
CALL = re.compile(
    r"(?<![\w.])open\(|\.(?:open|write_text|write_bytes|to_csv|to_json|to_parquet|to_pickle|to_excel|savefig|savez|save"
    r"|dump|write_table|ParquetWriter)\("
)
OWN = "in a temporary folder of the command's own"
LOCK = "a lock, of which nothing is read"
EXCEPTIONS = [
    ("common/run_lock.py", ".open(", LOCK),
    ("common/run_lock.py", ".open(", LOCK),
    ("common/terminal.py", "open(", "the null device"),
    ("common/terminal.py", ".open(", "the null device"),
    ("papers/evaluation/checkpoints.py", ".open(", "read in parts of a fixed size"),
    ("papers/evaluation/validation_run.py", ".open(", "a log that grows while a process runs"),
    ("run/explaining.py", "open(", OWN),
    *[("run/explain.py", call, OWN) for call in (".write_text(", ".write_text(", ".open(", ".open(")],
    ("run/stand_in.py", "open(", OWN),
    ("run/without_plugin.py", "open(", OWN),
    ("trainer/log.py", ".open(", "a log that grows while a process runs"),
]


def accesses(source: str) -> list[str]:
    """Every call that opens or writes a file past files.py, whose `replacing` gives a `partial` to write to."""
    return [call[0] for line in source.splitlines() if "partial" not in line for call in CALL.finditer(line)]


def test_files_are_written_whole():
    found = [
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "common" / "files.py"
        for call in accesses(path.read_text(encoding="utf-8"))
    ]
    known = [(file, call) for file, call, _ in EXCEPTIONS]
    assert sorted(found) == sorted(known), "use verl_clipx/common/files.py, or say why not"
