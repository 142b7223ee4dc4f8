"""Which of verl's trainers a run has, and how old its samples may be. Importing this is cheap."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_clipx.run import keys

# The trainers of verl 0.9: its older one, the modes of trainer.v1.trainer_mode, and the two experimental ones.
OLDER = "v0"
SYNC = "sync"
COLOCATED = "colocate_async"
SEPARATE = "separate_async"
ONE_STEP_OFF = "one_step_off"
FULLY_ASYNC = "fully_async"
KINDS = (OLDER, SYNC, COLOCATED, SEPARATE, ONE_STEP_OFF, FULLY_ASYNC)

# How many weight versions old a sample may be under the trainers that decide this themselves; None: there is no limit.
LIMITS = {OLDER: 0, SYNC: 0, ONE_STEP_OFF: 1, FULLY_ASYNC: None}


@dataclass(frozen=True)
class Trainer:
    """The trainer of a run.

    Args:
        kind: one of `KINDS`, or another mode of the v1 trainer; None if the configuration does not say it.
        in_step: whether sampling and training take turns on the same accelerators.
        recomputes_old: whether old_log_probs are recomputed with the weights that the first update of a rollout batch
            starts from, so that its ratio is 1 but for rounding.
        oldest_allowed: the most weight versions by which the weights that sampled may be older than the trainer's; None
            if there is no limit, or the configuration does not say it.
        stale: whether the weights that sampled may be older than those from which the first update on a rollout batch
            starts.
    """

    kind: str | None = None
    in_step: bool = False
    recomputes_old: bool = False
    oldest_allowed: int | None = None
    stale: bool = False

    @property
    def is_v1(self) -> bool:
        """Return whether it is verl's v1 trainer, which reads the keys of trainer.v1; True if the kind is unknown."""
        return self.kind not in (OLDER, ONE_STEP_OFF, FULLY_ASYNC)


def trainer_of(configuration: Mapping[str, Any]) -> Trainer:
    """Return the trainer that a configuration of verl's chooses.

    Args:
        configuration: the configuration's leaves by dotted key; it may lack any key.
    """
    kind = kind_of(configuration)
    bypass = bool(configuration.get(keys.BYPASS))
    return Trainer(
        kind=kind,
        in_step=kind in (OLDER, SYNC, COLOCATED),
        recomputes_old=kind in (OLDER, SYNC, COLOCATED, ONE_STEP_OFF) and not bypass,
        oldest_allowed=LIMITS[kind] if kind in LIMITS else configuration.get(keys.OLDEST_ALLOWED),
        stale=kind in (COLOCATED, SEPARATE, ONE_STEP_OFF, FULLY_ASYNC),
    )


def kind_of(configuration: Mapping[str, Any]) -> str | None:
    """Return `Trainer.kind`. The argument is that of `trainer_of`."""
    # The experimental trainers come first: their configurations have the keys of trainer.v1 too, and do not read them.
    async_settings = keys.below(configuration, keys.ASYNC_TRAINING)
    if any(value is not None for value in async_settings.values()):
        return FULLY_ASYNC
    if configuration.get(keys.ROLLOUT_NODES) is not None:
        return ONE_STEP_OFF
    if configuration.get(keys.USE_V1) is False:
        return OLDER
    return configuration.get(keys.TRAINER_MODE)
