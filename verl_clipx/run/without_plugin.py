"""Ends a Python that has verl and not the plugin, in which nothing would answer `clipx explain`, and verl would train.

Every Python of a command that is explained imports this file first, as sitecustomize. If verl is missing, a line says
so, and the program goes on, because it may do without verl. This file may import only the standard library.
"""

import gc
import os
import sys
from importlib import machinery, metadata, util

# Importing verl makes so many objects that Python's garbage collector would take a tenth of the import's time.
gc.set_threshold(1_000_000, 20, 50)
FOLDER = os.path.dirname(os.path.abspath(__file__))


def find_spec(name, path=None, target=None):
    """End the interpreter if it imports verl's trainer without the plugin. Always return None: no module is found here.

    Python calls this function for each module that is imported, because this module is in `sys.meta_path`.
    """
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
    """Append a line to the file from which explain.py reads what is wrong with a command, and return the line."""
    with open(os.path.join(os.path.dirname(FOLDER), "notes"), "a") as file:
        file.write(f"{what}\n")
    return what


this = sys.modules[__name__]
sys.meta_path.insert(0, this)
# The environment's own sitecustomize, which this file hides, is imported too.
hidden = machinery.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != FOLDER])
if hidden is not None:
    hidden.loader.exec_module(util.module_from_spec(hidden))
