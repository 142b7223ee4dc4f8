"""What a run trained, in one line, as far as its record says."""

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import name_of_model, names_of_data
from verl_clipx.run.record import Machines, is_number


def what_was_trained(runs: list[Run]) -> list[str]:
    """Describes each run in a line, equal ones once: model, data, batch, updates, rate, hardware; and when they began.

    What a record lacks is left out.
    """
    lines = [line for line in dict.fromkeys(map(_describe, runs)) if line]
    dates = sorted(run.record.started for run in runs if run.record.started)
    if dates:
        last = f" to {dates[-1]}" if dates[-1] != dates[0] else ""
        lines.append(f"Started {dates[0]}{last}")
    return [f"{line}." for line in lines]


def _describe(run: Run) -> str:
    record = run.record
    model = name_of_model(next(iter(record.model.paths), None))
    data = names_of_data(record.data.paths)
    parts = [" on ".join(name for name in (model, data) if name)]
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


def _hardware(machines: Machines) -> str:
    nodes, devices = machines.nodes, machines.devices_a_node
    if not (isinstance(nodes, int) and isinstance(devices, int)):
        return ""
    if machines.device == "cpu":
        return f"{nodes * devices} worker{'' if nodes * devices == 1 else 's'} on the CPU"
    kind = " or ".join(machines.accelerators) or "accelerators"
    return f"{nodes} × {devices} {kind}" if nodes > 1 else f"{devices} {kind}"
