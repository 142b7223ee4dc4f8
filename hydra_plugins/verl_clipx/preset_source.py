"""Serves the presets, configs/recipe/<paper>/presets.yaml, to Hydra: each is what a file of its name would be."""

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from verl_clipx.run.presets import entry_at, preset_names


class PresetSource(ConfigSource):
    """Reads a paper's presets when one of them is asked for, so that other applications don't pay for it."""

    @staticmethod
    def scheme() -> str:
        """Of the entry in search_path.py."""
        return "clipx-presets"

    def available(self) -> bool:
        """Always: the presets come with the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """The presets are options of the group recipe, as <paper>/<name>."""
        return config_path.strip("/") == "recipe"

    def is_config(self, config_path: str) -> bool:
        """Whether there is a preset or a part of this path."""
        return entry_at(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """A preset's defaults list and its own values."""
        entry = entry_at(config_path)
        if entry is None:
            raise ConfigLoadError(f"{config_path} is neither a preset nor a part of presets")
        config = OmegaConf.create({"defaults": list(entry.defaults)})
        for setting in entry.settings:
            OmegaConf.update(config, setting.key, setting.value, force_add=True)
        return ConfigResult(
            config=config, path=self.full_path(), provider=self.provider, header={"package": "_global_"}
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Every preset, for Hydra's message about an unknown one and for its completion."""
        if not self.is_group(config_path) or results_filter == ObjectType.GROUP:
            return []
        return preset_names()
