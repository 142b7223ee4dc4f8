"""A run's recorded configuration as one that verl's main takes, and what an arm makes of it."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_clipx.base.method import NODE
from verl_clipx.base.refusal import ABSENT, Refusal
from verl_clipx.common.secrets import REDACTED
from verl_clipx.run.keys import POLICY_LOSS, flat
from verl_clipx.runs.sameness import nested, setting_of_run, value_of

# Of a record, what follows from other keys, and traces, which have a folder of their own.
DERIVED = re.compile(
    rf"({re.escape(POLICY_LOSS)}\.({NODE}|run)|{NODE}\.(trace|_target_))(\.|$)"
    r"|.*\.optim\.total_training_steps$"
)
TAKEN = re.compile(rf"{re.escape(POLICY_LOSS)}\.run\.taken\.(\w+)\.key")
# verl's resume puts the values of the checkpoint's optimizer over these.
RESTORED = re.compile(r".*\.optim\.(weight_decay|betas|optimizer|optimizer_impl|override_optimizer_config)(\..*)?$")


def compose_words(name: str, words: Sequence[str], key: str) -> DictConfig:
    """Composes a configuration of verl's, or of Hydra's store, without importing verl; raises Refusal of a key."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise Refusal("verl", ABSENT, "it is not installed here", "Run clipx blame where the run can be trained.")
    try:
        with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
            config = compose(name, [*words])
    except (HydraException, OmegaConfBaseException) as error:
        reason = f"does not compose: {error}".splitlines()[0].rstrip(".")
        raise Refusal(key, " ".join(words), reason, "Correct its keys or values.") from None
    OmegaConf.set_struct(config, False)
    return config


def chosen_values(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's values by dotted key, without those that follow from others."""
    # The parameters of a run's method that follow from keys of verl's.
    taken = {f"{NODE}.{match[1]}" for key in recorded if (match := TAKEN.fullmatch(key))}
    return {key: value for key, value in recorded.items() if key not in taken and not DERIVED.match(key)}


def resolved(config: DictConfig) -> dict[str, Any]:
    """Returns a configuration's leaves by dotted key, as a run records them, without what `DERIVED` matches."""
    written = flat(OmegaConf.to_container(config))
    return {key: value_of(config, key, text) for key, text in written.items() if not DERIVED.match(key)}


def configuration_of(recorded: Mapping[str, Any], common: Sequence[str], *, with_loss: bool) -> DictConfig:
    """Composes verl's configuration with a record's values, but for what overrides say; raises Refusal.

    Args:
        recorded: from `chosen_values`.
        with_loss: whether with the run's loss, rather than with verl's defaults.
    """
    given, left_out = keys_of(common), () if with_loss else (f"{NODE}.", POLICY_LOSS)
    wanted = {key: of for key, of in recorded.items() if key not in given and not f"{key}.".startswith(left_out)}
    for key, value in wanted.items():
        if REDACTED in str(value):
            raise Refusal(key, value, "the record hides it as a credential", "Name a run that has none in a key.")
    method = wanted.get(f"{NODE}.method") or ("custom" if wanted.get(f"{NODE}.function") else None)
    words = [f"model_engine={wanted.get('model_engine', 'dp')}", *([f"+{NODE}={method}"] if method else [])]
    if any(key.startswith("clipx_rollout.") for key in wanted):
        words.append(f"+{NODE}/rollout={'stale' if 'clipx_rollout.versions_old' in wanted else 'seeded'}")
    base = compose_words("ppo_trainer", [*words, *common], "--with")
    record = OmegaConf.create(nested(wanted))
    config = OmegaConf.merge(base, record)
    for key, text in flat(OmegaConf.to_container(base)).items():
        said = OmegaConf.select(record, key, default=ABSENT) if "${" in str(text) else ABSENT
        if said is not ABSENT:
            # What follows from other keys goes on following, where that gives what was recorded.
            OmegaConf.update(config, key, text, merge=False)
            if value_of(config, key, text) != said:
                OmegaConf.update(config, key, said, merge=False)
    return config


def keys_of(words: Sequence[str]) -> set[str]:
    """Returns the keys of overrides; a group's is that of the node which it fills."""
    return {word.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for word in words}


def check_difference(what: str, words: Sequence[str], before: Mapping[str, Any], config: DictConfig) -> bool:
    """Returns whether a configuration differs from recorded values; raises Refusal if in more than words say."""
    old, new, text = setting_of_run(before), setting_of_run(resolved(config)), flat(OmegaConf.to_container(config))
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    named = tuple(f"{key}." for key in keys_of(words))
    named += (POLICY_LOSS,) * any(key.startswith(f"{NODE}.") for key in named)
    for key in differing:
        if "${" not in str(text.get(key)) and not f"{key}.".startswith(named):
            reason = f"it also changes {key} from {old.get(key)} to {new.get(key)}"
            raise Refusal(what, " ".join(words), reason, "Name every key, and no group but clipx.")
    return bool(differing)


def base_of(words: Sequence[str]) -> str:
    """Returns the name of the configuration that an arm's words go on top of."""
    return "run-without-loss" if NODE in keys_of(words) else "run"


def compose_arms(
    configuration: Mapping[str, Any], arms: Mapping[str, Sequence[str]], common: Sequence[str]
) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Returns what arms go on top of, by name in YAML, and all values by arm; raises Refusal of an arm not as asked.

    Args:
        configuration: of the run, dotted key to value.
        arms: name to words, first the unchanged run's.
        common: further words for all arms.
    """
    names, recorded = {base_of(words) for words in arms.values()}, chosen_values(configuration)
    bases = {name: configuration_of(recorded, common, with_loss=name == "run") for name in sorted(names)}
    check_difference("--with", common, resolved(OmegaConf.create(nested(recorded))), bases["run"])
    unchanged = resolved(bases["run"])
    values = dict.fromkeys(arms, unchanged)
    for name, words in list(arms.items())[1:]:
        ConfigStore.instance().store(f"{name}.yaml", bases[base_of(words)])
        arm = compose_words(name, words, f"--arm {name}")
        values[name] = resolved(arm)
        changes = [key for key, value in values[name].items() if unchanged.get(key) != value]
        why = [f"verl's resume puts the checkpoint's value over {key}" for key in changes if RESTORED.match(key)]
        if not check_difference(f"--arm {name}", words, unchanged, arm):
            why = ["the run has these values already, or no result depends on them"]
        if why:
            raise Refusal(f"--arm {name}", " ".join(words), why[0], "Blame another change.")
    return {name: OmegaConf.to_yaml(config) for name, config in bases.items()}, values
