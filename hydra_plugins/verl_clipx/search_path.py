"""Appends the plugin's `configs` folder and the presets in it to the search path."""

import os
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_clipx.common.verl_version import unsuitable_verl
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.run.explain import EXPLAIN


class VerlClipxSearchPath(SearchPathPlugin):
    """Found by Hydra in any environment where verl-clipx is installed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends, so that an application's own groups of the same name win.

        Raises:
            SystemExit: the command is only to be explained, and no hook of the plugin would end it beside this verl.
        """
        unsuitable = unsuitable_verl() if EXPLAIN in os.environ else None
        if unsuitable:
            sys.exit(f"clipx explain: {unsuitable}")
        search_path.append(provider="verl-clipx", path="clipx-presets://recipe")
        search_path.append(provider="verl-clipx", path=f"clipx-groups://{configs_folder()}")
