"""What a run trained, in one line, as far as its record says."""

from collections.abc import Mapping
from typing import Any

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.sameness import name_of_model, names_of_data

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def what_was_trained(runs: list[Run]) -> list[str]:
    """Describes each run in a line, equal ones once: model, data, batch, updates, rate, hardware; and when they began.

    What a record lacks is left out.
    """
    lines = [line for line in dict.fromkeys(map(_describe, runs)) if line]
    dates = sorted(str(run.record["started"]) for run in runs if run.record.get("started"))
    if dates:
        lines.append(f"Started {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""))
    return [f"{line}." for line in lines]


def _describe(run: Run) -> str:
    values = run.configuration
    prompts, responses = values.get("data.train_batch_size"), values.get(f"{ROLLOUT}.n")
    updates = run.schedule.updates_a_step
    rate = values.get(f"{ACTOR}.optim.lr")
    batch = f"{prompts} prompts" + (f" × {responses} responses" if responses else "") + " a rollout batch"
    model = name_of_model(values.get("actor_rollout_ref.model.path"))
    parts = [
        " on ".join(filter(None, (model, names_of_data(values.get("data.train_files"))))),
        batch if prompts else "",
        f"{updates} update{'' if updates == 1 else 's'} on each" if updates else "",
        f"learning rate {rate:g}" if isinstance(rate, int | float) else "",
        _hardware(values, run.record.get("accelerators")),
    ]
    return ", ".join(filter(None, parts))


def _hardware(configuration: Mapping[str, Any], accelerators: Any) -> str:
    nodes, workers = (configuration.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node"))
    if not (isinstance(nodes, int) and isinstance(workers, int)):
        return ""
    if configuration.get("trainer.device") == "cpu":
        return f"{nodes * workers} worker{'' if nodes * workers == 1 else 's'} on the CPU"
    kind = " or ".join(map(str, accelerators)) if isinstance(accelerators, list) and accelerators else "accelerators"
    return f"{nodes} × {workers} {kind}" if nodes > 1 else f"{workers} {kind}"
