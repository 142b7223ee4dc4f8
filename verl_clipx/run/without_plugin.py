"""What every Python of a command that is explained imports first, as sitecustomize: it ends one that would train.

Without the plugin nothing would answer, and verl would start. It stands by itself, because such a Python has no more
than the standard library. A missing verl is only noted, since a program may do without.
"""

import os
import sys
from importlib import machinery, metadata, util

FOLDER = os.path.dirname(os.path.abspath(__file__))


class WithoutPlugin:
    """A finder that finds nothing, and looks at what is imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Ends the interpreter if verl's trainer is imported and the plugin is not there."""
        if name == "verl" and not any(finder.find_spec(name, path) for finder in sys.meta_path if finder is not cls):
            plugin = "" if util.find_spec("verl_clipx") else " and no verl-clipx"
            note(f"{sys.executable} has no verl{plugin}")
        if name == "verl.trainer" and "verl_clipx.plugin" not in sys.modules:
            chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
            if not any(plugin.value == "verl_clipx.plugin" for plugin in metadata.entry_points(group="verl.plugins")):
                raise SystemExit(note(f"{sys.executable} has verl and no verl-clipx"))
            if chosen:
                raise SystemExit(note(f"VERL_USE_EXTERNAL_PLUGINS={chosen} leaves verl-clipx out"))


def note(what: str) -> str:
    """Leaves a line for explain.py, and returns it."""
    with open(os.path.join(os.path.dirname(FOLDER), "notes"), "a") as file:
        file.write(f"{what}\n")
    return what


sys.meta_path.insert(0, WithoutPlugin)
# The one that this file hides.
hidden = machinery.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != FOLDER])
if hidden is not None:
    hidden.loader.exec_module(util.module_from_spec(hidden))
