"""Ends a Python that would train; every Python of a command that is explained imports it first, as sitecustomize.

Without the plugin nothing would answer, and verl would start. A missing verl is only noted, since a program may do
without. It knows no more than the standard library.
"""

import gc
import os
import sys
from importlib import machinery, metadata, util

# With the usual threshold the collector runs thousands of times while verl is imported, for a tenth of the seconds.
gc.set_threshold(1_000_000, 20, 50)
FOLDER = os.path.dirname(os.path.abspath(__file__))


def find_spec(name, path=None, target=None):
    """Find no module, but end the interpreter if it imports verl's trainer without the plugin."""
    if name == "verl" and not any(finder.find_spec(name, path) for finder in sys.meta_path if finder is not this):
        note(f"{sys.executable} has no verl{'' if util.find_spec('verl_clipx') else ' and no verl-clipx'}")
    if name == "verl.trainer" and "verl_clipx.plugin" not in sys.modules:
        left_out = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        if not any(plugin.value == "verl_clipx.plugin" for plugin in metadata.entry_points(group="verl.plugins")):
            by_uv = ""
            if "UV" in os.environ:
                by_uv = ", into which `uv pip install` puts it, and from which `uv sync` removes it"
            raise SystemExit(note(f"{sys.executable} has verl and no verl-clipx{by_uv}"))
        if left_out:
            raise SystemExit(note(f"VERL_USE_EXTERNAL_PLUGINS={left_out} leaves verl-clipx out"))


def note(what: str) -> str:
    """Leave a line for explain.py, and return it."""
    with open(os.path.join(os.path.dirname(FOLDER), "notes"), "a") as file:
        file.write(f"{what}\n")
    return what


this = sys.modules[__name__]
sys.meta_path.insert(0, this)
# The one that this file hides.
hidden = machinery.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != FOLDER])
if hidden is not None:
    hidden.loader.exec_module(util.module_from_spec(hidden))
