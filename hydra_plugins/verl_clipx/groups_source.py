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

from verl_clipx.common.verl_version import unsuitable_verl
from verl_clipx.losses.base.refusal import did_you_mean
from verl_clipx.run.presets import preset_names

NODE = "clipx"


class GroupsSource(FileConfigSource):
    """The folder's files, as Hydra's own source for files has them.

    A group's file that is missed here another source may have. Where none has it, Hydra asks each source for the names
    in the group, for its message.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._missed = ""

    @staticmethod
    def scheme() -> str:
        """Of the entry in search_path.py."""
        return "clipx-groups"

    def is_config(self, config_path: str) -> bool:
        """Whether the folder has this group's file."""
        exists = super().is_config(config_path)
        self._missed = "" if exists else config_path.strip("/").removesuffix(".yaml")
        return exists

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups in a folder.

        Raises:
            ConfigCompositionException: the name that was missed is almost one of them.
        """
        group = config_path.strip("/")
        name = self._missed.removeprefix(f"{group}/")
        if name != self._missed:
            known = [path.stem for path in Path(self.path, group).glob("*.yaml")]
            known += preset_names() if group == "recipe" else []
            hint = did_you_mean(name, sorted(known), f"+{group}=")
            if hint and name not in known:
                raise ConfigCompositionException(f"+{group}={name}: there is no such group.{hint}")
        return super().list(config_path, results_filter)

    def load_config(self, config_path: str) -> ConfigResult:
        """The file's content; its node clipx takes any key.

        Raises:
            ConfigCompositionException: this verl is not one that the plugin extends, so that nothing would act on it.
        """
        unsuitable = unsuitable_verl()
        if unsuitable:
            raise ConfigCompositionException(f"{config_path.removesuffix('.yaml')}: {unsuitable}")
        result = super().load_config(config_path)
        node = result.config.get(NODE) if isinstance(result.config, DictConfig) else None
        if isinstance(node, DictConfig):
            OmegaConf.set_struct(node, False)
        return result
