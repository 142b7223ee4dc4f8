"""What a run trained, in one line, as far as its record says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import name_of_model, names_of_data
from verl_clipx.run.record import Content, Machines
from verl_clipx.run.sampling import is_number

# What programs put behind a name to tell versions apart.
_HASHES = re.compile(r"(-[0-9a-f]{8,})+$")
# The folder of a revision in the hub's cache, below models--<owner>--<name>/snapshots.
_REVISION = re.compile(r"[0-9a-f]{40}")
# A file of this name says nothing of its task, which the folder around it then names.
REWARD = "reward"


def what_was_trained(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Describes the runs in lines, equal ones once: model, data, batch, updates, rate, hardware; and when they began.

    What a record lacks is left out.

    Args:
        runs: the runs of each setting, by its label, which begins its line where the lines differ.
    """
    labels: dict[str, list[str]] = {}
    for label, of_setting in runs.items():
        for line in dict.fromkeys(map(_describe, of_setting)):
            if line:
                labels.setdefault(line, []).append(label)
    lines = list(labels)
    if len(labels) > 1:
        lines = [f"{', '.join(of_line)}: {line}" for line, of_line in labels.items()]
    dates = sorted(run.record.started for of_setting in runs.values() for run in of_setting if run.record.started)
    if dates:
        last = f" to {dates[-1]}" if dates[-1] != dates[0] else ""
        lines.append(f"Started {dates[0]}{last}")
    return [f"{line}." for line in lines]


def _describe(run: Run) -> str:
    record = run.record
    names = [_name_model(record.model), _name_task(record.reward) or names_of_data(record.data.paths)]
    parts = [" on ".join(name for name in names if name)]
    if record.batch.prompts:
        responses = f" × {record.batch.responses} responses" if record.batch.responses else ""
        parts.append(f"{record.batch.prompts} prompts{responses} a rollout batch")
    updates = record.schedule.updates_a_step
    if updates:
        parts.append(f"{updates} update{'' if updates == 1 else 's'} on each")
    if is_number(record.optimizer.rate):
        parts.append(f"learning rate {record.optimizer.rate:g}")
    parts.append(_hardware(record.machines))
    return ", ".join(part for part in parts if part)


def _name_model(model: Content) -> str:
    """Names a model in words: where a program made its folder's name, by its size, if that is known."""
    if not model.paths:
        return ""
    path = PurePosixPath(model.paths[0])
    if _REVISION.fullmatch(path.name) and path.parent.name == "snapshots":
        return path.parents[1].name.rpartition("--")[2]
    name = name_of_model(path)
    words = _HASHES.sub("", name)
    if words == name:
        return name
    if model.parameters is None:
        return words.replace("_", " ")
    return f"A policy of {_size(model.parameters)} parameters"


def _size(parameters: int) -> str:
    """Writes a number of parameters with two digits or more: 873K, 1M, 1.5B."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.995 * unit:
            size = parameters / unit
            return f"{size:.0f}{letter}" if size >= 9.95 else f"{size:.2g}{letter}"
    return str(parameters)


def _name_task(reward: Content) -> str:
    """Names the task of a reward function that is kept as <task>/reward.py; empty for any other one."""
    if not reward.paths:
        return ""
    parts = re.split(r"[./]", reward.paths[0].removesuffix(".py"))
    if len(parts) < 2 or parts[-1] != REWARD:
        return ""
    return parts[-2].replace("_", " ").capitalize()


def _hardware(machines: Machines) -> str:
    nodes = machines.nodes
    devices = machines.devices_a_node
    if not (isinstance(nodes, int) and isinstance(devices, int)):
        return ""
    if machines.device == "cpu":
        return f"{nodes * devices} worker{'' if nodes * devices == 1 else 's'} on the CPU"
    kind = " or ".join(machines.accelerators) or "accelerators"
    return f"{nodes} × {devices} {kind}" if nodes > 1 else f"{devices} {kind}"
