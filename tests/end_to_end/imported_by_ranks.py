"""Imported once, by the process that ranks are forked from: each of them would spend five seconds on it."""

import gc
import os

# verl reads it when it is imported.
os.environ |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}

# What is imported lives to the end: the collector would go through it in vain, here and in every rank.
gc.disable()

from verl.workers import engine_workers  # noqa: E402, F401
from verl.workers.utils import losses  # noqa: E402, F401

import verl_clipx.training.worker.step  # noqa: E402, F401

gc.freeze()
gc.enable()
