"""Serves the groups of the folder configs, and says what a mistyped group or key under clipx could have meant.

Hydra answers `clipx.alhpa=2` with the advice to write `+clipx.alhpa=2`, which then is refused, too. Here the node clipx
takes any key, and the factory that it names refuses the unknown one with the nearest known one, before Ray starts.
"""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.verl_clipx.misspelt import Missed
from verl_clipx.common.presets import preset_names
from verl_clipx.common.verl_version import unsuitable_verl

NODE = "clipx"


class GroupsSource(FileConfigSource):
    """The folder's files, as Hydra's own source for files has them."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.missed = Missed()

    @staticmethod
    def scheme() -> str:
        """Of the entry in search_path.py."""
        return "clipx-groups"

    def is_config(self, config_path: str) -> bool:
        """Whether the folder has this group's file."""
        found = super().is_config(config_path)
        self.missed.path = "" if found else config_path.strip("/").removesuffix(".yaml")
        return found

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups in a folder, which Hydra asks for where one is unknown."""
        group = config_path.strip("/")
        if self.missed.path:
            presets = preset_names() if group == "recipe" else []
            self.missed.refuse(group, [*presets, *(path.stem for path in Path(self.path, group).glob("*.yaml"))])
        return super().list(config_path, results_filter)

    def load_config(self, config_path: str) -> ConfigResult:
        """The file's content; its node clipx takes any key.

        Raises:
            ConfigCompositionException: this verl is not one that the plugin extends, so that nothing would act on it.
        """
        unsuitable = unsuitable_verl()
        if unsuitable:
            raise ConfigCompositionException(f"{config_path.removesuffix('.yaml')}: {unsuitable}")
        found = super().load_config(config_path)
        node = found.config.get(NODE) if isinstance(found.config, DictConfig) else None
        if isinstance(node, DictConfig):
            OmegaConf.set_struct(node, False)
        return found
