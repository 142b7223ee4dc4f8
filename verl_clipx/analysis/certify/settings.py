"""What a run's configuration says that two arms must share, and what they may differ in without a word."""

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

# In which two arms may differ where the command line says nothing: the loss.
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
RECORDED = (
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
# What other keys and the line are made of; the loss itself stands in the clipx node.
DERIVED = (f"{FACTS}*", f"{POLICY_LOSS}.clipx*", "ray_kwargs.*")
# Where a run began; a question of its own asks that.
START = (RESUME_MODE, RESUME_PATH)
# Whatever the path, what is there is compared by its content, by questions of their own.
READ = (
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
    *RECORDED,
    *DERIVED,
    *START,
    *READ,
)
# What a run reads of a checkpoint. It matters where the run began with one.
LOADED = ("*.load_contents",)
# How long a run goes on. It matters where the learning rate follows from it.
LENGTH = (TOTAL_EPOCHS, TOTAL_STEPS, "*.optim.total_training_steps")


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Returns whether one of the patterns, or the key itself, is among them."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def compared_values(run: Run) -> dict[str, str]:
    """Returns what a run must share with others: dotted key to value in JSON."""
    # What these name is compared by its content too.
    files = further_files(run.configuration)
    patterns = [*MAY_DIFFER, *files]
    if not rate_follows_length(run):
        patterns += LENGTH
    if not starts_from_checkpoint(run):
        patterns += LOADED

    def may_differ(key: str) -> bool:
        return matches(key, patterns)

    values = resolved_values(parsed(run.configuration), may_differ)
    return {key: json.dumps(value, default=str) for key, value in values.items() if value is not None}


def starts_from_checkpoint(run: Run) -> bool:
    """Returns whether a run's first step was trained from a checkpoint, by its record or its configuration."""
    return bool(run.record.start.paths) or run.record.resumption.is_named


def rate_follows_length(run: Run) -> bool:
    """Returns whether the learning rate at a step depends on the last step: it decays, or rises for a share of all."""
    optimizer = run.record.optimizer
    decays = optimizer.schedule not in (None, "constant")
    rises_for_share = bool(optimizer.warmup_ratio) and not (optimizer.warmup_steps or 0) > 0
    return decays or rises_for_share


def differing(runs: Sequence[Run], values_of: Callable[[Run], Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Returns what sets runs apart: name to each run's value, None where a run lacks it."""
    values = [values_of(run) for run in runs]
    names = sorted({name for of_run in values for name in of_run})
    columns = {name: [of_run.get(name) for of_run in values] for name in names}
    return {name: column for name, column in columns.items() if len({*column}) > 1}
