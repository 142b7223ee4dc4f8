"""Serves the methods' groups once more, for the shadow: `clipx/shadow/acpo` is what `clipx/acpo` says of the method."""

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from hydra_plugins.verl_clipx.misspelt import Missed
from verl_clipx.common.configs_folder import configs_folder

GROUP = "clipx/shadow"
NO_METHODS = {"base", "observe"}


def names() -> list[str]:
    """The groups that choose a method."""
    return sorted({path.stem for path in (configs_folder() / "clipx").glob("*.yaml")} - NO_METHODS)


class ShadowSource(ConfigSource):
    """Makes a node under clipx.shadow of a method's group when it is asked for."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.missed = Missed()

    @staticmethod
    def scheme() -> str:
        """Of the entry in search_path.py."""
        return "clipx-shadow"

    def available(self) -> bool:
        """Always: the groups come with the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether the methods are options of this group."""
        return config_path.strip("/") == GROUP

    def is_config(self, config_path: str) -> bool:
        """Whether a method's group has this name."""
        path = config_path.strip("/").removesuffix(".yaml")
        folder, _, name = path.rpartition("/")
        found = folder == GROUP and name in names()
        self.missed.path = "" if found else path
        return found

    def load_config(self, config_path: str) -> ConfigResult:
        """The method of a group with its own parameters, under clipx.shadow."""
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{config_path} is not the group of a method")
        from verl_clipx.driver.listing import shadow_node

        name = config_path.strip("/").removesuffix(".yaml").rpartition("/")[2]
        policy_loss = {
            # The plugin's, so that a launch without a method (+clipx=...) stops.
            "_target_": "verl_clipx.driver.hydra_nodes.ClipxPolicyLossConfig",
            "clipx": "${clipx}",
        }
        config = OmegaConf.create(
            {
                "clipx": {"shadow": {name: shadow_node(name)}},
                "actor_rollout_ref": {"actor": {"policy_loss": policy_loss}},
            }
        )
        return ConfigResult(
            config=config, path=self.full_path(), provider=self.provider, header={"package": "_global_"}
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Every method's group, for Hydra's message about an unknown one."""
        if not self.is_group(config_path) or results_filter == ObjectType.GROUP:
            return []
        self.missed.refuse(GROUP, names())
        return names()
