"""What a run trained, in one line, as far as its record says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import name_of_model, names_of_data
from verl_clipx.run.record import Content, Machines
from verl_clipx.run.sampling import is_number

# The hashes that this plugin's programs append to a policy's name, of 16 digits each.
_HASHES = re.compile(r"(-[0-9a-f]{16})+$")
# The folder of a revision in the hub's cache.
_REVISION = re.compile(r"[0-9a-f]{40}")
# The name of a reward's file or module that does not tell the task. The folder or package around it is named by it.
NAME_WITHOUT_TASK = "reward"
PACKAGE_PREFIX = "pkg://"


def describe_training(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Describe what runs trained: model, data, batch, updates, learning rate and hardware; and when they began.

    What a record lacks is left out.

    Args:
        runs: the runs of each setting, by the setting's label.

    Returns:
        One line for each different description, then one with the dates. If the descriptions differ, each begins with
        the labels of its settings.
    """
    labels_by_line: dict[str, list[str]] = {}
    for label, runs_of_setting in runs.items():
        for line in dict.fromkeys(_describe(run) for run in runs_of_setting):
            if line:
                labels_by_line.setdefault(line, []).append(label)
    lines = list(labels_by_line)
    if len(lines) > 1:
        lines = [f"{', '.join(labels)}: {line}" for line, labels in labels_by_line.items()]
    every_run = [run for runs_of_setting in runs.values() for run in runs_of_setting]
    dates = sorted(run.record.started for run in every_run if run.record.started)
    if dates:
        last = f" to {dates[-1]}" if dates[-1] != dates[0] else ""
        lines.append(f"Started {dates[0]}{last}")
    return [f"{line}." for line in lines]


def _describe(run: Run) -> str:
    """Describe what a run trained, as a sentence without its full stop; empty if the record says nothing."""
    record = run.record
    names = [_name_model(record.model), _name_task(record.reward) or names_of_data(record.data.paths)]
    parts = [" on ".join(name for name in names if name)]
    if record.batch.prompts:
        responses = f" × {record.batch.responses} responses" if record.batch.responses else ""
        parts.append(f"{record.batch.prompts} prompts{responses} a rollout batch")
    updates = record.schedule.updates_a_step
    if updates:
        noun = "update" if updates == 1 else "updates"
        # The part before this one, if there is one, ends with "a rollout batch".
        batch = "each" if record.batch.prompts else "each rollout batch"
        parts.append(f"{updates} {noun} on {batch}")
    if is_number(record.optimizer.rate):
        parts.append(f"learning rate {record.optimizer.rate:g}")
    parts.append(_name_hardware(record.machines))
    return ", ".join(part for part in parts if part)


def _name_model(model: Content) -> str:
    """Name a model; empty without a path.

    The name is that of the model's folder, or that of the model on the hub for a folder in the hub's cache. If the
    folder's name ends in hashes, as this plugin's programs write it, the model is named by its number of parameters.
    If that is unknown too, it is named by the folder's name without the hashes.
    """
    if not model.paths:
        return ""
    path = PurePosixPath(model.paths[0])
    # The hub's cache keeps a model in models--<owner>--<name>/snapshots/<revision>.
    if _REVISION.fullmatch(path.name) and path.parent.name == "snapshots":
        return path.parents[1].name.rpartition("--")[2]
    name = name_of_model(path)
    if not _HASHES.search(name):
        return name
    if model.parameters is None:
        return _HASHES.sub("", name).replace("_", " ")
    return f"A policy of {_write_size(model.parameters)} parameters"


def _write_size(parameters: int) -> str:
    """Write a number of parameters in thousands, millions or billions: 873K, 1M, 1.5B.

    Numbers below 10 of a unit are rounded to two digits, larger ones to a whole number of the unit.
    """
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        # What rounds to 1 of a unit is written in it.
        if parameters >= 0.995 * unit:
            size = parameters / unit
            return f"{size:.0f}{letter}" if size >= 9.95 else f"{size:.2g}{letter}"
    return str(parameters)


def _name_task(reward: Content) -> str:
    """Name the task of a reward function that is in a file <task>/reward.py or a module pkg://<package>.<task>.reward.

    Returns:
        The task's name in words; empty for any other path, and without one.
    """
    if not reward.paths:
        return ""
    path = reward.paths[0]
    if path.startswith(PACKAGE_PREFIX):
        parts = path.removeprefix(PACKAGE_PREFIX).split(".")
    else:
        parts = path.removesuffix(".py").split("/")
    if len(parts) < 2 or parts[-1] != NAME_WITHOUT_TASK:
        return ""
    task = parts[-2].replace("_", " ")
    return task[:1].upper() + task[1:]


def _name_hardware(machines: Machines) -> str:
    """Say on how many devices of which kind a run trained; empty if the record does not say it."""
    nodes = machines.nodes
    devices = machines.devices_a_node
    if not (isinstance(nodes, int) and isinstance(devices, int)):
        return ""
    if machines.device == "cpu":
        workers = nodes * devices
        return f"{workers} {'worker' if workers == 1 else 'workers'} on the CPU"
    # Where the cluster has several kinds, nothing says which of them the run used.
    kind = " or ".join(machines.accelerators)
    if not kind:
        kind = "accelerator" if devices == 1 else "accelerators"
    if nodes > 1:
        return f"{nodes} × {devices} {kind}"
    return f"{devices} {kind}"
