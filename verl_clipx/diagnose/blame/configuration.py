"""A run's recorded configuration as overrides of verl's own, and in what an arm's configuration differs from it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_clipx.base.method import NODE
from verl_clipx.base.refusal import ABSENT, Refusal
from verl_clipx.common.secrets import REDACTED
from verl_clipx.run.config import completed
from verl_clipx.run.keys import POLICY_LOSS
from verl_clipx.runs.run import flat
from verl_clipx.runs.sameness import setting_of_run

# Of a record, what follows from other keys, and traces, which have a folder of their own.
DERIVED = re.compile(
    rf"({re.escape(POLICY_LOSS)}\.({NODE}|run)|{NODE}\.(trace|_target_))(\.|$)"
    r"|.*\.optim\.total_training_steps$"
)
TAKEN = re.compile(rf"{re.escape(POLICY_LOSS)}\.run\.taken\.(\w+)\.key")
# verl's resume puts the values of the checkpoint's optimizer over these.
RESTORED = re.compile(r".*\.optim\.(weight_decay|betas|optimizer|optimizer_impl|override_optimizer_config)(\..*)?$")
_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w/.-]*", re.I)


class Composed(NamedTuple):
    """A composed configuration's leaves by dotted key: as written, and with those interpolations that resolve here."""

    written: dict[str, Any]
    leaves: dict[str, Any]

    @property
    def setting(self) -> dict[str, Any]:
        """What makes up the run's setting."""
        return setting_of_run({key: value for key, value in self.leaves.items() if not DERIVED.match(key)})

    def derives(self, key: str) -> bool:
        """Whether a key's value follows from other keys."""
        return "${" in str(self.written.get(key))


def compose_run(words: Sequence[str]) -> Composed:
    """Composes verl's configuration as its main would, without importing verl; raises Refusal."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise Refusal("verl", ABSENT, "it is not installed here", "Run clipx blame where the run can be trained.")
    try:
        with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
            config = compose("ppo_trainer", [*words])
    except (HydraException, OmegaConfBaseException) as error:
        raise Refusal(" ".join(words[-3:]), ABSENT, f"does not compose: {error}".splitlines()[0].rstrip(".")) from None
    return composed_of(config)


def composed_of(config: DictConfig) -> Composed:
    """A configuration's leaves; what does not resolve here stays as it is written."""
    composed = Composed(flat(OmegaConf.to_container(config)), {})
    for key, value in composed.written.items():
        composed.leaves[key] = value
        with suppress(OmegaConfBaseException):
            composed.leaves[key] = OmegaConf.select(config, key) if composed.derives(key) else value
    return composed


def taken_over(recorded: Mapping[str, Any]) -> set[str]:
    """The parameters of a run's method that follow from keys of verl's."""
    return {f"{NODE}.{match[1]}" for key in recorded if (match := TAKEN.fullmatch(key))}


def words_of(recorded: Mapping[str, Any]) -> list[str]:
    """The overrides under which verl's configuration is the recorded one; raises Refusal if that hides a value.

    Args:
        recorded: dotted key to value, from `Run.configuration`.
    """
    ours = recorded.get(f"{NODE}.method") or ("custom" if recorded.get(f"{NODE}.function") else None)
    taken = taken_over(recorded)
    wanted = {key: value for key, value in recorded.items() if not DERIVED.match(key) and key not in taken}
    words = [f"model_engine={recorded['model_engine']}"] if recorded.get("model_engine", "dp") != "dp" else []
    words += [f"+{NODE}={ours}"] if ours else []
    if any(key.startswith("clipx_rollout.") for key in wanted):
        words.append(f"+{NODE}/rollout={'stale' if 'clipx_rollout.versions_old' in wanted else 'seeded'}")
    defaults = {f"{NODE}.{key}": value for key, value in completed({"method": ours}).items()}
    # What is derived from another key follows it once that is set, or else is set itself.
    for derived in (False, True):
        base = compose_run(words)
        for key, value in wanted.items():
            usual = defaults.get(key)
            if value in (base.written.get(key, usual), base.leaves.get(key, usual)) or base.derives(key) > derived:
                continue
            if REDACTED in str(value):
                raise Refusal(key, value, "the record hides it as a credential", "Name a run that has none in a key.")
            words.append(f"++{key}={as_word(value)}")
    return words


def without_loss(words: Sequence[str]) -> list[str]:
    """The words of a run but those of its loss, for an arm that chooses another."""
    return [
        word
        for word in words
        if word.startswith(f"+{NODE}/") or not f"{key_of(word)}.".startswith((f"{NODE}.", POLICY_LOSS))
    ]


def as_word(value: Any) -> str:
    """A value as Hydra's grammar writes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_word(of_key)}" for key, of_key in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return "null" if value is None else str(value)


def key_of(word: str) -> str:
    """The key of an override; a group's is that of the node which it fills."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".")


def check_arm(name: str, words: Sequence[str], unchanged: Composed, arm: Composed) -> None:
    """Refuses an arm that differs from the unchanged run in nothing, or in more than its words say."""
    before, after = unchanged.setting, arm.setting
    differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    named = [f"{key_of(word)}." for word in words]
    named += [POLICY_LOSS] * any(key.startswith(f"{NODE}.") for key in named)
    why = [
        f"it also changes {key} from {before.get(key)} to {after.get(key)}: name every key, and no group but clipx"
        for key in differing
        if not unchanged.derives(key) and not f"{key}.".startswith(tuple(named))
    ]
    why += [f"verl's resume puts the checkpoint's value over {key}" for key in differing if RESTORED.match(key)]
    why += ["the run has these values already, or no result depends on them"] * (not differing)
    if why:
        raise Refusal(f"--arm {name}", " ".join(words), why[0], "Blame another change.")
