"""Failing runs with a planted cause, through verl's main with Ray: what `clipx blame` says of each.

Run: python benchmarks/blame_faults.py plan CAUSE SEED RUNS, in this repository's folder, so that no record has a path
of a machine; RUNS is where plans go, and what is there is not made again. docs/results/blame_protocol.md says what is
planted, docs/results/blame.md where its runs in one process and those that fail by chance were made.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from one_process.kept import SEED_KEYS, keep_run

from verl_clipx.common.statistics.comparison import LEVEL
from verl_clipx.diagnose.blame.plan import Plan
from verl_clipx.diagnose.blame.reruns import answer
from verl_clipx.runs.folder import KEPT, read_run

KEPT_RUNS = Path(__file__).parents[1] / "docs" / "results" / "runs" / "blame"
ANSWERS, BY_RAY = KEPT_RUNS / "answers.json", KEPT_RUNS / "answers_ray.json"
COMMON = (
    *("+hardware=cpu", "+recipe=reversal/base", "+clipx=grpo", "actor_rollout_ref.actor.optim.lr=1e-3"),
    "actor_rollout_ref.model.path=docs/results/evidence_policy",
    *("data.max_response_length=24", "algorithm.rollout_correction.bypass_mode=false"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"),
    *("trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.total_training_steps=12"),
)


class Cause(NamedTuple):
    """A planted fault: overrides, the rule that fails, the checkpoint's step, and the arm that takes it away."""

    words: tuple[str, ...]
    rule: str
    step: int
    arm: str


COLLAPSE, MISMATCH = "reward collapse", "mismatch of rollout and training"
OPTIMIZER, REWARD = "actor_rollout_ref.actor.optim", "reward.custom_reward_function"
MODULE, ASKED = "actor_rollout_ref.model.external_lib", "+actor_rollout_ref.rollout.engine_kwargs.planted"
CAUSES = {
    "rate": Cause(
        *((f"{OPTIMIZER}.optimizer_impl=planted", f"{OPTIMIZER}.optimizer=FastAdamW"), COLLAPSE, 6),
        f"{OPTIMIZER}.lr=3.3e-5",
    ),
    "sampler": Cause((f"{MODULE}=planted", f"{ASKED}.last_version=6"), MISMATCH, 6, f"{MODULE}=null"),
    "reward": Cause(
        *((f"{REWARD}.path=pkg://planted", f"{REWARD}.name=lying_score", "data.shuffle=false"), COLLAPSE, 6),
        f"{REWARD}.path=pkg://verl_clipx.papers.tasks.reversal.reward {REWARD}.name=compute_score",
    ),
    "old": Cause((f"{MODULE}=planted", f"{ASKED}.versions_old=8"), MISMATCH, 1, f"{MODULE}=null"),
}


def make_failing(cause: Cause, seed: int, folder: Path) -> None:
    """Trains the run that is to fail, if it is not there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [*COMMON, *(f"{key}={seed}" for key in SEED_KEYS), *cause.words, f"trainer.save_freq={cause.step}"]
    words += [f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder}"]
    with (folder / "console.log").open("wb") as output:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        log = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
        subprocess.run(command, stdout=output, stderr=output, env=os.environ | log, check=True)
    (folder / "done").touch()


def keep(folder: Path) -> None:
    """Keeps a run's log in one file of docs/results/runs/blame: of its metrics, those that the rules read."""
    run = read_run(folder)
    read = [
        key for key in run.log if key.startswith(("critic/score/", "critic/rewards/", "training/rollout_", "actor/"))
    ]
    record = {"commit": run.record["commit"], "versions": dict(run.versions), "seed": run.seed}
    metrics = {step: row.dropna().to_dict() for step, row in run.log[read].iterrows()}
    keep_run(KEPT_RUNS / folder.parent.name / f"{folder.name}{KEPT}", record, metrics)


def make_plan(name: str, seed: int, runs: Path) -> None:
    """Makes a failing run, blames it by the command line, and keeps logs and answer."""
    cause, out = CAUSES[name], runs / f"{name}-seed{seed}"
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(folders), "VERL_PLATFORM": "cpu"}
    os.environ.setdefault("CLIPX_DATA", "data/evidence")
    make_failing(cause, seed, out / "failing")
    options = ["--rule", cause.rule, "--arm", f"cause: {cause.arm}", "--with", "+hardware=cpu", "--out", out]
    command = [sys.executable, "-m", "verl_clipx.cli", "blame", out / "failing", "--from", str(cause.step)]
    subprocess.run([*command, *options], check=True)
    plan = Plan(**json.loads((out / "plan.json").read_text()))
    for folder in [out / "failing", *(rerun.folder for rerun in plan.reruns(out))]:
        if (folder / "metrics.jsonl").exists():
            keep(folder)
    row = {"cause": name, "seed": seed, "step": plan.step, "until": plan.until, "onset": plan.onset}
    others = [one for one in read_answers(BY_RAY) if (one["cause"], one["seed"]) != (name, seed)]
    BY_RAY.write_text(json.dumps([*others, row | {"arms": answer(plan, out)}], indent=1) + "\n")


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The answers that were kept."""
    return json.loads(path.read_text()) if path.exists() else []


def find_named_arms(row: Mapping[str, Any]) -> set[str]:
    """The arms that an answer names; none if the plan was refused."""
    return {name for name, of in row.get("arms", {}).items() if of["p"] is not None and of["p"] < LEVEL}


def print_table() -> None:
    """Prints a row for each cause: its plans, unchanged reruns that failed, and in how many plans an arm was named."""
    print("| cause | plans | unchanged failed | named | another named | named through Ray |")
    print("|---|---|---|---|---|---|")
    for cause in [*CAUSES, "chance"]:
        rows, by_ray = ([row for row in read_answers(path) if row["cause"] == cause] for path in (ANSWERS, BY_RAY))
        failed, of = (sum(row["arms"]["unchanged"][key] for row in rows if "arms" in row) for key in ("failed", "of"))
        right, wrong = (
            sum(bool(find_named_arms(row) & names) for row in rows) for names in ({"cause"}, {"placebo", "another"})
        )
        right_by_ray = sum("cause" in find_named_arms(row) for row in by_ray)
        refused = sum("arms" not in row for row in rows)
        plans = f"{len(rows)}, {refused} refused" if refused else len(rows)
        shown = right_by_ray if by_ray else ""
        print(f"| {cause} | {plans} | {failed} of {of} | {'' if cause == 'chance' else right} | {wrong} | {shown} |")


def main(
    what: Annotated[str, typer.Argument(help="plan or table.")],
    cause: Annotated[str, typer.Argument(help=f"{', '.join(CAUSES)}.")] = "rate",
    seed: Annotated[int, typer.Argument(help="The seed of the failing run.")] = 50,
    runs: Annotated[Path, typer.Argument(help="Where plans are.")] = Path("runs/blame"),
) -> None:
    """Makes one plan, or prints the table of the kept answers."""
    if what == "table":
        print_table()
    else:
        make_plan(cause, seed, runs)


if __name__ == "__main__":
    typer.run(main)
