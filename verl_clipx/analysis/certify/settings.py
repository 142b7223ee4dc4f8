"""Which values of their configurations two arms must share, and in which keys they may differ."""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import parsed, resolved_values
from verl_clipx.run.keys import (
    ACTOR,
    CHECKPOINT_FOLDER,
    CHECKPOINT_FOLDER_ON_HDFS,
    CHECKPOINTS_KEPT,
    CRITIC_MODEL_PATH,
    DELETES_LOADED_CHECKPOINT,
    FACTS,
    LOGGED_VALIDATION_SAMPLES,
    LOGGERS,
    MODEL_PATH,
    POLICY_LOSS,
    RESUME_MODE,
    RESUME_PATH,
    REWARD_FUNCTIONS,
    ROLLOUT_FOLDER,
    SAVE_EVERY,
    SAVES_BEFORE_EXPIRY,
    TOKENIZER_PATH,
    TOTAL_EPOCHS,
    TOTAL_STEPS,
    TRAINING_FILES,
    VALIDATE_EVERY,
    VALIDATES_FIRST,
    VALIDATION_FILES,
    VALIDATION_FOLDER,
    further_files,
)

# The keys of the loss. The arms must differ in them if `--vary` names no keys.
LOSS = ("clipx", "clipx.*", f"{POLICY_LOSS}.*", f"{ACTOR}.clip_ratio*")

SEEDS = ("*.seed", "*.data_loader_seed")
NAMES = ("*.project_name", "*.experiment_name")
FOLDERS = (
    CHECKPOINT_FOLDER,
    CHECKPOINT_FOLDER_ON_HDFS,
    ROLLOUT_FOLDER,
    VALIDATION_FOLDER,
    "*.profiler.save_path",
    "global_profiler.save_path",
)
PORTS = ("*.port", "*_port", "*.metadata_server", "*.master_server_address")
CHECKPOINTS = (
    SAVE_EVERY,
    CHECKPOINTS_KEPT,
    DELETES_LOADED_CHECKPOINT,
    SAVES_BEFORE_EXPIRY,
    "*.checkpoint.save_contents",
    "*.checkpoint.async_save",
)
VALIDATIONS = (VALIDATE_EVERY, VALIDATES_FIRST)
LOGGING = (
    LOGGERS,
    LOGGED_VALIDATION_SAMPLES,
    "clipx.trace*",
    "clipx.metrics",
    "clipx.log",
    "clipx.health",
    "*.profiler.*",
    "global_profiler.*",
    "*.prometheus.*",
    "transfer_queue.metrics.*",
)
# What the plugin writes into the configuration, which follows from other keys; and how Ray starts.
DERIVED = (f"{FACTS}*", f"{POLICY_LOSS}.clipx*", "ray_kwargs.*")
# Where a run began. Another question compares that.
RESUMING = (RESUME_MODE, RESUME_PATH)
# Paths of what a run reads. Other questions compare the contents.
PATHS_READ = (
    MODEL_PATH,
    CRITIC_MODEL_PATH,
    TOKENIZER_PATH,
    TRAINING_FILES,
    VALIDATION_FILES,
    *(f"{node}.path" for node in REWARD_FUNCTIONS),
)
MAY_DIFFER = (
    *SEEDS,
    *NAMES,
    *FOLDERS,
    *PORTS,
    *CHECKPOINTS,
    *VALIDATIONS,
    *LOGGING,
    *DERIVED,
    *RESUMING,
    *PATHS_READ,
)
# What a run loads of a checkpoint. It is compared only if the run began with one.
LOADED_FROM_CHECKPOINT = ("*.load_contents",)
# How many steps a run has. It is compared only if the learning rate depends on it.
RUN_LENGTH = (TOTAL_EPOCHS, TOTAL_STEPS, "*.optim.total_training_steps")


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key matches one of the patterns; a key matches itself."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def compared_values(run: Run) -> dict[str, str]:
    """Return the values of a run's configuration that two runs of an experiment must share.

    Keys that may differ, and keys without a value, are left out. A value that refers to a key that may differ names
    that key.

    Args:
        run: a run with a configuration.

    Returns:
        From a dotted key to its value in JSON.
    """
    patterns = list(MAY_DIFFER)
    # These keys name files, which are compared by their contents, as those of PATHS_READ.
    patterns += further_files(run.configuration)
    if not rate_follows_length(run):
        patterns += RUN_LENGTH
    if not starts_from_checkpoint(run):
        patterns += LOADED_FROM_CHECKPOINT

    def may_differ(key: str) -> bool:
        return matches(key, patterns)

    values = resolved_values(parsed(run.configuration), leave_out=may_differ)
    # A value that OmegaConf leaves as an object of its own is compared as text.
    return {key: json.dumps(value, default=str) for key, value in values.items() if value is not None}


def starts_from_checkpoint(run: Run) -> bool:
    """Return whether a run's first step was trained from a checkpoint, by its record or its configuration."""
    return bool(run.record.start.paths) or run.record.resumption.is_named


def rate_follows_length(run: Run) -> bool:
    """Return whether the learning rate at a step depends on how many steps the run has.

    It does if the rate decays, or if it rises at first for a share of the steps.
    """
    optimizer = run.record.optimizer
    decays = optimizer.schedule not in (None, "constant")
    # verl reads the share of the steps only if no number of warm-up steps is set: if it is null, 0 or below.
    sets_warmup_steps = optimizer.warmup_steps is not None and optimizer.warmup_steps > 0
    rises_for_share = bool(optimizer.warmup_ratio) and not sets_warmup_steps
    return decays or rises_for_share


def differing(runs: Sequence[Run], values_of: Callable[[Run], Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return the values that are not the same in all runs.

    Args:
        runs: any runs.
        values_of: returns the values of a run by their names.

    Returns:
        From the name of each such value to its values in the order of the runs, with None for a run that lacks it. The
        names are sorted.
    """
    values_by_run = [values_of(run) for run in runs]
    names: set[str] = set()
    for values in values_by_run:
        names.update(values)
    differing_values = {}
    for name in sorted(names):
        column = [values.get(name) for values in values_by_run]
        if len({*column}) > 1:
            differing_values[name] = column
    return differing_values
