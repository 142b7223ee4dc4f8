"""Lets these tests import from benchmarks/, last: its trace.py must not hide the standard library's."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
