"""Imported once, by the process that ranks are forked from: each of them would spend seven seconds on it."""

import os

# verl reads it when it is imported.
os.environ |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}

from verl.workers import engine_workers  # noqa: F401
from verl.workers.utils import losses  # noqa: F401

import verl_clipx.worker.step  # noqa: F401
