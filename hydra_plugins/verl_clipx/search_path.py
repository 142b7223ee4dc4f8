"""Appends the plugin's `configs` folder and the presets in it to the search path."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_clipx.common.configs_folder import configs_folder


class VerlClipxSearchPath(SearchPathPlugin):
    """Found by Hydra in any environment where verl-clipx is installed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends, so that an application's own groups of the same name win."""
        search_path.append(provider="verl-clipx", path="clipx-presets://recipe")
        search_path.append(provider="verl-clipx", path=f"clipx-groups://{configs_folder()}")
