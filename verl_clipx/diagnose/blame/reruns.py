"""Makes a plan's reruns, one after another, and says what they answer."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_clipx.base.refusal import Refusal
from verl_clipx.common import with_parent
from verl_clipx.common.files import making_folder, write_text
from verl_clipx.common.run_files import LOG_VARIABLE, METRICS
from verl_clipx.common.statistics.comparison import LEVEL, chance_of_missing, compare_failures, holm
from verl_clipx.common.statistics.estimate import share
from verl_clipx.diagnose.blame.plan import RATES, UNCHANGED, Plan, Rerun, until_step
from verl_clipx.diagnose.rule import RULES
from verl_clipx.runs.folder import RunFolder, read_run
from verl_clipx.runs.run import Run

FAILED, HELD, ERROR = "failed", "held", "ended by an error"
# In the folder of a rerun that ended before its last step: its exit code.
CODE = "exit_code"
# The files of verl's FSDP checkpoints that hold a learning rate (utils/checkpoint/fsdp_checkpoint_manager.py).
HOLD_RATES = ("optim_world_size_*.pt", "extra_state_world_size_*.pt")
# In them, those of the optimizer's groups, and those of the schedule.
RATES_OF = {"lr", "initial_lr", "base_lrs", "_last_lr"}


@cache
def read_original(path: str) -> Run:
    """Reads the failed run."""
    return read_run(Path(path))


def costs_of(plan: Plan) -> str:
    """Says what a plan costs, before anything starts."""
    reruns, steps = len(plan.arms) * len(plan.seeds), plan.until - plan.step
    seconds = read_original(plan.run).values("timing_s/step").tail(10).mean()
    files = (Path(plan.checkpoint, role).glob(HOLD_RATES[0]) for of in plan.rates.values() for role in of)
    copied = sum(file.stat().st_size for of_role in files for file in of_role) / 1e9
    return (
        f"{len(plan.arms)} arms with {len(plan.seeds)} seeds, {steps} steps each: {reruns * steps} steps"
        f"{f', about {reruns * steps * seconds / 3600:.2g} h as the run went' * bool(seconds > 0)}. On the disk: "
        f"logs, no checkpoints, and {copied:.2g} GB of optimizers with another learning rate."
    )


def copy_checkpoints(plan: Plan, out: Path) -> None:
    """Makes the checkpoints of the arms that change a learning rate, which verl's resume takes from there.

    They are links to the run's files, but for those that hold a rate. Raises Refusal if there is no such file.
    """
    import torch

    for arm, factors in plan.rates.items():
        copy = plan.checkpoint_of(arm, out)
        if not factors or copy.is_dir():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        with making_folder(copy) as partial:
            shutil.copytree(plan.checkpoint, partial, copy_function=os.symlink)
            for role, factor in factors.items():
                files = [file for name in HOLD_RATES for file in (partial / role).glob(name)]
                if not files:
                    reason = f"no file in {plan.checkpoint}/{role} holds a learning rate as verl's FSDP engine keeps it"
                    raise Refusal(RATES[role], f"{factor:g} times", reason, "Blame another change.")
                for file in files:
                    state = torch.load(file, map_location="cpu", weights_only=False)
                    for part in (*state.get("param_groups", ()), state.get("lr_scheduler") or {}):
                        part |= {key: (factor * numpy.array(part[key])).tolist() for key in RATES_OF & part.keys()}
                    file.unlink()
                    torch.save(state, file)


def outcome_of(plan: Plan, rerun: Rerun) -> str | None:
    """Returns `FAILED`, `HELD` or `ERROR`, or None for a rerun that is still to be made.

    The rule judges the failed run's log up to the checkpoint, with the rerun's behind it.
    """
    if not (rerun.folder / METRICS).exists() or RunFolder(rerun.folder).last_step < plan.until:
        return ERROR if (rerun.folder / CODE).exists() else None
    before, after = until_step(read_original(plan.run), plan.step), until_step(read_run(rerun.folder), plan.until)
    steps = pandas.concat([before.log, after.log[after.log.index > plan.step]])
    wrong = {key: [*before.not_finite.get(key, []), *at] for key, at in after.not_finite.items()}
    (rule,) = [rule for rule in RULES if rule.name == plan.rule]
    onset = rule.onset(replace(before, log=steps, not_finite=before.not_finite | wrong))
    return FAILED if onset is not None and onset.step > plan.step else HELD


def make_reruns(plan: Plan, out: Path, say: Callable[[str], None]) -> None:
    """Makes the reruns that are missing with the plan's launcher; what a kill left unfinished begins anew.

    Each ends with this process.
    """
    for number, rerun in enumerate(reruns := plan.reruns(out), 1):
        if outcome_of(plan, rerun) is None:
            shutil.rmtree(rerun.folder, ignore_errors=True)
            rerun.folder.mkdir(parents=True)
            command = [sys.executable, with_parent.__file__, *plan.launcher, *rerun.words]
            variables = os.environ | {LOG_VARIABLE: str(rerun.folder / METRICS)}
            with (rerun.folder / "console.log").open("wb") as output:
                ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
            if outcome_of(plan, rerun) is None:
                write_text(rerun.folder / CODE, f"{ended.returncode}\n")
            say(f"{number} of {len(reruns)}, {rerun.folder.name}: {outcome_of(plan, rerun)}")


def answer(plan: Plan, out: Path) -> Mapping[str, Mapping[str, Any]]:
    """Counts by arm the reruns that failed and that ended by an error, with p after Holm that fewer failed.

    Where the unchanged run did not fail in most of its reruns, p is None, as it always is for that run.
    """
    outcomes = {arm: [outcome_of(plan, one) for one in plan.reruns(out) if one.arm == arm] for arm in plan.arms}
    counts = {arm: (of.count(FAILED), of.count(FAILED) + of.count(HELD)) for arm, of in outcomes.items()}
    first, *others = counts.values()
    p_values = [None, *holm([compare_failures(first, of) if 2 * first[0] > first[1] else None for of in others])]
    return {
        arm: {"failed": failed, "of": of, "errors": outcomes[arm].count(ERROR), "p": p}
        for (arm, (failed, of)), p in zip(counts.items(), p_values, strict=True)
    }


def lines_of(plan: Plan, out: Path) -> list[str]:
    """Returns the answer in lines."""
    arms, width = answer(plan, out), max(map(len, plan.arms)) + 2
    said = f"{plan.run}: {plan.rule} from step {plan.onset} on. Reruns from step {plan.step} to {plan.until}"
    lines, corrected = [f"{said}, {len(plan.seeds)} seeds an arm:"], f" after Holm over {len(arms) - 1} arms"
    for arm, (failed, of, errors, p) in ((arm, of.values()) for arm, of in arms.items()):
        shown = f", {errors} ended by an error and count neither way" * bool(errors)
        if p is not None:
            shown += f"   prevents it (p {p:.2g}{corrected * (len(arms) > 2)})" if p < LEVEL else "   can't be said"
        lines.append(f"  {arm:{width}}failed {failed} of {of}{shown}")
    if all(of["p"] is None for of in arms.values()):
        lines.append("The failure did not recur in most of the unchanged reruns, so nothing is blamed.")
        if of := arms[UNCHANGED]["of"]:
            high = share(arms[UNCHANGED]["failed"], of).high
            lines[-1] += f" Its rate may be up to {high:.0%} (95 % interval), and one that high would be missed so in "
            lines[-1] += f"{chance_of_missing(high, of):.0%} of the cases."
    not_said = f"Not said: two changes at once; anything about the steps before {plan.step}; which loss is better."
    return [*lines, not_said, SAMPLE]


SAMPLE = (
    "An unchanged rerun is a sample of the run, not a replay: verl's resume restores weights, optimizer, schedule, "
    "ranks' random state and the place in the data, but not the sampler's random state, nor samples that were old."
)
