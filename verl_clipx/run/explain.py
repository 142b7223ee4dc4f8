"""Explains what a verl command would train, without running it."""

import argparse
import contextlib
import importlib.util
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_clipx.base.method import NODE, Method, interval
from verl_clipx.base.refusal import written
from verl_clipx.run.announcement import shown
from verl_clipx.run.config import Settings, clip_range
from verl_clipx.run.resolve import instantiated
from verl_clipx.run.start import decide
from verl_clipx.run.unknown_keys import near_another, refused_by_verl, with_known_keys
from verl_clipx.run.user_keys import keys_in_files, named_keys
from verl_clipx.run.verl_keys import ACTOR

# verl's entry modules, each with the name of its default configuration in the folder "config" beside the module.
MAIN_PPO = "verl.trainer.main_ppo"
ENTRIES = {
    MAIN_PPO: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}


@dataclass(frozen=True)
class TakenOver:
    """A value of verl's that the method takes over.

    Args:
        key, given: verl's key and its value.
        parameter, value: the method's parameter and the value that it gets.
    """

    key: str
    given: float | None
    parameter: str
    value: float | None


@dataclass(frozen=True)
class Explanation:
    """What a command would train.

    Args:
        line: the line that the run prints, or a line that says that the plugin has no part in the run.
        loss_mode: the loss's name in verl's registry.
        of_the_plugin: whether the plugin has a part in the run.
        bounds: the bounds that the loss starts with, or what they are computed from, in words.
        taken: what the method takes over from verl's keys.
        notes: what may not be meant as it stands, in sentences.
    """

    line: str
    loss_mode: str
    of_the_plugin: bool
    bounds: str
    taken: tuple[TakenOver, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The line, the bounds, then one line for each value that is taken over and for each note."""
        return [
            self.line,
            f"bounds at the start: {self.bounds}",
            *(f"taken over: {of.key}={written(of.given)} as {of.parameter}={shown(of.value)}" for of in self.taken),
            *(f"note: {note}" for note in self.notes),
        ]


def explained(words: Sequence[str]) -> Explanation:
    """What a command would train: the line that the run prints, and what it takes over from verl's keys.

    Args:
        words: `python -m MODULE KEY=VALUE …`, with anything before `-m`, or only the overrides.

    Raises:
        ValueError: the module is not one of verl's entry modules, a key does not exist, or the run would stop.
        Exception: Hydra's errors in composing, or verl's own in validating.
    """
    module, arguments = split_command(words)
    config, overrides, choices, named = with_known_keys(partial(composed, module), arguments)
    decision = decide(config, named=named, group=choices.get(NODE))
    if module == MAIN_PPO:
        validate(config)
    actor = config.actor_rollout_ref.actor
    loss_mode, node = actor.policy_loss.loss_mode, actor.policy_loss.get(NODE)
    settings = None if node is None else instantiated(node)
    bounds = of_method(settings.method) if isinstance(settings, Settings) else of_verls_loss(actor)
    notes = tuple(near_another(overrides, config))
    if decision is None:
        line = f"clipx: no part in this run, which trains verl's own loss {loss_mode}"
        return Explanation(line, loss_mode, False, bounds, notes=notes)
    taken = (
        TakenOver(f"{ACTOR}.{of['key']}", of["given"], f"{NODE}.{parameter}", of["value"])
        for parameter, of in decision.resolved.run.taken.items()
    )
    return Explanation(decision.line, loss_mode, True, bounds, tuple(taken), notes)


def validate(config: DictConfig) -> None:
    """Calls verl's own check of a configuration, without those parts that need the critic's model or vLLM.

    Raises:
        ValueError: verl has no such key; names the nearest.
        Exception: verl's own errors.
    """
    config = config.copy()
    with open_dict(config):
        # verl would load the critic's tokenizer from the hub, and ask an installed vLLM for its LoRA ranks.
        config.critic.model = None
        config.actor_rollout_ref.model.lora_rank = 0
        if OmegaConf.select(config, "actor_rollout_ref.model.lora.rank"):
            config.actor_rollout_ref.model.lora.rank = 0
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            validate_config(config, need_reference_policy(config), need_critic(config))
        except InstantiationException as error:
            raise refused_by_verl(error, config) from None


def of_method(method: Method) -> str:
    """A method's bounds and its other limits, in words."""
    others = (f"{key} {value:g}" for key in method.other_limits if (value := getattr(method, key)) is not None)
    return "; ".join([method.starting_bounds, *others])


def of_verls_loss(actor: DictConfig) -> str:
    """The bounds of verl's own loss, in words. They are known only for vanilla, verl's default loss."""
    loss_mode = actor.policy_loss.loss_mode
    if loss_mode != "vanilla":
        return f"those of verl's own loss {loss_mode}, which the plugin does not know"
    return f"ratio {interval(*clip_range(actor))}; clip_ratio_c {actor.clip_ratio_c:g}"


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The entry module of a command, and the arguments of the module.

    Raises:
        ValueError: the module after `-m` is not one of verl's entry modules.
    """
    if "-m" not in words:
        return MAIN_PPO, list(words)
    place = list(words).index("-m") + 1
    module = words[place] if place < len(words) else "nothing"
    if module not in ENTRIES:
        raise ValueError(f"python -m {module}: not one of verl's entry modules. These are {', '.join(ENTRIES)}.")
    return module, list(words[place + 1 :])


def composed(module: str, arguments: Sequence[str]) -> tuple[DictConfig, list[str], DictConfig, set[str]]:
    """The configuration of an entry module, its overrides, Hydra's choices of groups, and the keys that the user set.

    Args:
        module: one of `ENTRIES`.
        arguments: overrides, and Hydra's options --config-path, --config-name and --config-dir.

    Raises:
        ValueError: an argument is neither an override nor one of these options, or the folder does not exist.
        HydraException: the overrides do not compose.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", default="config")
    parser.add_argument("--config-name", "-cn", default=ENTRIES[module])
    parser.add_argument("--config-dir", "-cd")
    options, overrides = parser.parse_known_args(list(arguments))
    unknown = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if unknown:
        raise ValueError(f"{unknown[0]}: is neither KEY=VALUE nor an option that this command knows.")
    beside = Path(importlib.util.find_spec(module).origin).parent
    with initialize_config_dir(str((beside / options.config_path).resolve()), version_base=None):
        if options.config_dir is not None:
            prepend_folder(Path(options.config_dir))
        config = compose(options.config_name, overrides, return_hydra_config=True)
        named = named_keys(overrides) | keys_in_files(options.config_name, overrides)
    choices = config.hydra.runtime.choices
    with open_dict(config):
        del config.hydra
    return config, overrides, choices, named


def prepend_folder(folder: Path) -> None:
    """Puts a folder's groups and configurations before all others, as --config-dir does in hydra.main.

    Raises:
        ValueError: the folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"--config-dir={folder}: no such folder.")
    loader = GlobalHydra.instance().config_loader()
    search_path = loader.get_search_path()
    search_path.prepend("command-line", f"file://{folder.resolve()}", anchor=SearchPathQuery(provider="schema"))
    # Hydra's compose has no such option, and its loader has already read the search path.
    loader.repository = ConfigRepository(search_path)
