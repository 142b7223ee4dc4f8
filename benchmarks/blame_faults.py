"""Failing runs with a planted cause, and such as fail by chance: what `clipx blame` says of each.

Run: CLIPX_DATA=DATA python benchmarks/blame_faults.py proof RUNS    (DATA: as docs/results/evidence.md builds it)
     CLIPX_DATA=DATA python benchmarks/blame_faults.py ray RUNS

Small policies on reversal, trained by verl's trainer and worker in this process's children, or by verl's main with Ray.
RUNS is where the plans go; what is there is not made again. docs/results/blame_protocol.md says what is planted and
what counts. Start it in this repository's folder, so that no record has a path of a machine.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from one_process.kept import SEED_KEYS, keep_run
from one_process.only_rank import become_only_rank

from verl_clipx.common.statistics.comparison import LEVEL
from verl_clipx.diagnose.blame import plan as planning
from verl_clipx.diagnose.blame import reruns as making
from verl_clipx.runs.folder import KEPT, read_run

ROOT = Path(__file__).parents[1]
KEPT_RUNS = ROOT / "docs" / "results" / "runs" / "blame"
ANSWERS, BY_RAY = KEPT_RUNS / "answers.json", KEPT_RUNS / "answers_ray.json"
RATE, SINCE = 1e-3, 7
COMMON = (
    *("+hardware=cpu", "+recipe=reversal/base", "+clipx=grpo", f"actor_rollout_ref.actor.optim.lr={RATE}"),
    "actor_rollout_ref.model.path=docs/results/evidence_policy",
    *("data.max_response_length=24", "algorithm.rollout_correction.bypass_mode=false"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"),
    *("trainer.logger=[file]", "trainer.resume_mode=disable", "trainer.total_training_steps=12"),
)


def fast_rate(trainer: Any) -> None:
    """The learning rate is 30 times that of the configuration."""
    engine, rate = trainer.actor_rollout_wg.worker.actor.engine, 30 * trainer.config.actor_rollout_ref.actor.optim.lr
    engine.lr_scheduler.base_lrs = [rate for _ in engine.lr_scheduler.base_lrs]
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def frozen_sampler(trainer: Any) -> None:
    """The sampler's weights are no longer updated."""
    trainer.replay_buffer.keep = lambda *_: None


def lying_reward(trainer: Any) -> None:
    """The reward is the share of the letter a."""
    trainer.replay_buffer.reward = lambda source, text, *_: {
        "score": text.count("a") / max(len(text), 1), "acc": 0.0, "format": 1.0
    }  # fmt: skip


def is_tossed(name: str) -> bool:
    """How a coin falls for a run's name."""
    return sha256(name.encode()).digest()[0] % 2 == 1


def tossed_damage(trainer: Any) -> None:
    """A coin, tossed by the run's name, decides whether each weight gets noise of twice its own spread."""
    import torch

    name = trainer.config.trainer.experiment_name
    if trainer.global_steps != trainer.config.planted.since - 1 or not is_tossed(name):
        return
    generator = torch.Generator().manual_seed(trainer.config.actor_rollout_ref.rollout.seed)
    with torch.no_grad():
        for weight in trainer.actor_rollout_wg.worker.actor.engine.module.parameters():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local += 2 * local.std() * torch.randn(local.shape, generator=generator)
    trainer.replay_buffer.keep(trainer.global_steps, trainer.actor_rollout_wg.weights())


PLANTED: dict[str, Callable[[Any], None]] = {
    act.__name__: act for act in (fast_rate, frozen_sampler, lying_reward, tossed_damage)
}


def train_here(words: list[str], log: Path) -> None:
    """Trains as `python -m verl.trainer.main_ppo WORDS` would, in this process, with what is planted."""
    import hydra
    from one_process.trainer import OneProcessTrainer, train

    class Planted(OneProcessTrainer):
        def on_step_end(self) -> None:
            super().on_step_end()
            planted = self.config.get("planted") or {}
            if planted.get("fault") and self.global_steps >= planted.since - 1:
                PLANTED[planted.fault](self)

        on_init_end = on_step_end

    sys.argv[1:] = words
    hydra.main("pkg://verl.trainer.config", "ppo_trainer", version_base=None)(
        lambda config: train(config, log, Planted)
    )()


class Cause(NamedTuple):
    """What is planted: overrides, the rule that fails, the checkpoint's step, and the arms, the right one first."""

    words: tuple[str, ...]
    rule: str
    step: int
    arms: tuple[str, ...]


def planted(fault: str) -> tuple[str, ...]:
    """The overrides that plant a fault of `PLANTED`."""
    return (f"+planted.fault={fault}", f"+planted.since={SINCE}")


COLLAPSE, MISMATCH = "reward collapse", "mismatch of rollout and training"
PLACEBO, ANOTHER = "placebo: critic.optim.lr=2e-5", "another: critic.optim.lr=3e-5"
NONE = "cause: planted.fault=null"
CAUSES = {
    "rate": Cause(planted("fast_rate"), COLLAPSE, 6, (f"cause: actor_rollout_ref.actor.optim.lr={RATE / 30}", PLACEBO)),
    "sampler": Cause(planted("frozen_sampler"), MISMATCH, 6, (NONE, PLACEBO)),
    "reward": Cause(planted("lying_reward"), COLLAPSE, 6, (NONE, PLACEBO)),
    "old": Cause(
        ("clipx_rollout.versions_old=8",), MISMATCH, 1, ("cause: clipx_rollout.versions_old=0", PLACEBO)
    ),
    "chance": Cause(planted("tossed_damage"), COLLAPSE, 6, (PLACEBO, ANOTHER)),
}  # fmt: skip
ROUNDS, BY_CHANCE = 4, 6

OLD_WEIGHTS = ("actor_rollout_ref.model.external_lib=planted", "+actor_rollout_ref.rollout.engine_kwargs.planted.")
NO_MODULE, REWARD = "cause: actor_rollout_ref.model.external_lib=null", "reward.custom_reward_function"
# By cause what brings it to verl's workers, and the arm.
THROUGH_RAY = {
    "rate": (
        ("actor_rollout_ref.actor.optim.optimizer_impl=planted", "actor_rollout_ref.actor.optim.optimizer=FastAdamW"),
        CAUSES["rate"].arms[0],
    ),
    "sampler": ((OLD_WEIGHTS[0], f"{OLD_WEIGHTS[1]}last_version={SINCE - 1}"), NO_MODULE),
    "reward": (
        (f"{REWARD}.path=pkg://planted", f"{REWARD}.name=lying_score", "data.shuffle=false"),
        f"cause: {REWARD}.path=pkg://verl_clipx.papers.tasks.reversal.reward {REWARD}.name=compute_score",
    ),
    "old": ((OLD_WEIGHTS[0], f"{OLD_WEIGHTS[1]}versions_old=8"), NO_MODULE),
}
SEED_THROUGH_RAY = 50


def in_child(act: Callable[[], None], output: Path) -> int:
    """Acts in a child of this process, which has imported verl already; returns its exit code."""
    child = os.fork()
    if not child:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def by_fork(folder: Path, words: list[str]) -> int:
    """Trains in a child of this process; returns its exit code."""
    return in_child(lambda: train_here(words, folder / "metrics.jsonl"), folder / "console.log")


def by_main(folder: Path, words: list[str]) -> int:
    """Trains by verl's main, with Ray; returns its exit code."""
    with (folder / "console.log").open("wb") as output:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        log = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
        return subprocess.run(command, stdout=output, stderr=output, env=os.environ | log).returncode


def make_failing(
    train: Callable[[Path, list[str]], int], faulty: Sequence[str], step: int, folder: Path, seed: int
) -> None:
    """Trains the run that is to fail, if it is not there."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [*COMMON, *(f"{key}={seed}" for key in SEED_KEYS), *faulty, f"trainer.save_freq={step}"]
    words += [f"trainer.experiment_name={folder.parent.name}", f"hydra.run.dir={folder}"]
    if code := train(folder, [*words, f"trainer.default_local_dir={folder / 'checkpoints'}"]):
        raise RuntimeError(f"{folder}/console.log: the run ended with exit code {code}")
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


def blame(runs: Path, name: str, seed: int) -> dict[str, Any]:
    """Makes a failing run, plans its reruns as the command does, makes them, and returns the answer."""
    cause, failing = CAUSES[name], runs / f"{name}-seed{seed}" / "failing"
    make_failing(by_fork, cause.words, cause.step, failing, seed)
    row = {"cause": name, "seed": seed}
    try:
        plan = planning.make_plan(failing, cause.step, cause.arms, rule=cause.rule)
    except ValueError as error:
        return row | {"refused": str(error)}
    out = failing.parent
    plan.keep(out)
    making.copy_checkpoints(plan, out)
    making.make_reruns(
        *(plan, out, lambda said: print(f"{time.strftime('%T')} {out.name}: {said}", flush=True)),
        lambda plan, rerun: by_fork(rerun.folder, rerun.words),
    )
    return row | keep_answer(plan, failing)


def keep_answer(plan: planning.Plan, failing: Path) -> dict[str, Any]:
    """Keeps the logs of a plan, and returns its answer."""
    out = failing.parent
    for folder in [failing, *(rerun.folder for rerun in plan.reruns(out))]:
        if (folder / "metrics.jsonl").exists():
            keep(folder)
    return {"step": plan.step, "until": plan.until, "onset": plan.onset, "arms": making.answer(plan, out)}


def blame_through_ray(runs: Path, name: str) -> dict[str, Any]:
    """Makes a failing run by verl's main, blames it by the command line, and returns the answer."""
    (words, arm), cause, out = THROUGH_RAY[name], CAUSES[name], runs / f"{name}-seed{SEED_THROUGH_RAY}"
    failing = out / "failing"
    os.environ |= {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}", "VERL_PLATFORM": "cpu"}
    os.environ.setdefault("CLIPX_DATA", "data/evidence")
    make_failing(by_main, words, cause.step, failing, SEED_THROUGH_RAY)
    options = ["--rule", cause.rule, "--arm", arm, "--with", "+hardware=cpu", "--out", out]
    subprocess.run([sys.executable, "-m", "verl_clipx.cli", "blame", failing, "--from", f"{cause.step}", *options])
    row = {"cause": name, "seed": SEED_THROUGH_RAY}
    if not (out / "plan.json").exists():
        return row | {"refused": "see the output"}
    return row | keep_answer(planning.Plan(**json.loads((out / "plan.json").read_text())), failing)


def proof_through_ray(runs: Path) -> None:
    """Makes the runs through Ray that are missing, and keeps each answer as soon as it stands."""
    rows = read_answers(BY_RAY)
    for name in THROUGH_RAY:
        if not any(row["cause"] == name for row in rows):
            rows.append(blame_through_ray(runs, name))
            BY_RAY.write_text(json.dumps(rows, indent=1) + "\n")


def proof(runs: Path) -> None:
    """Makes the runs that are missing in the protocol's order, and keeps each answer as soon as it stands."""
    os.environ.setdefault("CLIPX_DATA", "data/evidence")
    become_only_rank()
    # Once for all children.
    import one_process.trainer  # noqa: F401

    rows, chance = read_answers(), 200
    for number in range(1, BY_CHANCE + 1):
        for name in CAUSES if number <= ROUNDS else ["chance"]:
            seed = 10 * number
            if name == "chance":
                while not is_tossed(f"chance-seed{chance}"):
                    chance += 10
                seed, chance = chance, chance + 10
            if not any((row["cause"], row["seed"]) == (name, seed) for row in rows):
                rows.append(blame(runs.absolute(), name, seed))
                ANSWERS.parent.mkdir(parents=True, exist_ok=True)
                ANSWERS.write_text(json.dumps(rows, indent=1) + "\n")


def read_answers(path: Path = ANSWERS) -> list[dict[str, Any]]:
    """The answers that were kept."""
    return json.loads(path.read_text()) if path.exists() else []


def find_named_arms(row: Mapping[str, Any]) -> set[str]:
    """The arms that an answer names; none if the plan was refused."""
    return {name for name, of in row.get("arms", {}).items() if of["p"] is not None and of["p"] < LEVEL}


def print_table() -> None:
    """Prints a row for each cause: its plans, unchanged reruns that failed, and in how many plans an arm was named."""
    print("| cause | plans | unchanged reruns failed | its arm named | another named | its arm named, through Ray |")
    print("|---|---|---|---|---|---|")
    for cause in CAUSES:
        rows, by_ray = ([row for row in read_answers(path) if row["cause"] == cause] for path in (ANSWERS, BY_RAY))
        failed, of = (sum(row["arms"]["unchanged"][key] for row in rows if "arms" in row) for key in ("failed", "of"))
        right, wrong = (
            sum(bool(find_named_arms(row) & names) for row in rows) for names in ({"cause"}, {"placebo", "another"})
        )
        right_by_ray = sum("cause" in find_named_arms(row) for row in by_ray)
        refused = sum("arms" not in row for row in rows)
        plans = f"{len(rows)}, {refused} refused" if refused else len(rows)
        shown = f"{right_by_ray} of {len(by_ray)}" if by_ray else ""
        print(f"| {cause} | {plans} | {failed} of {of} | {'' if cause == 'chance' else right} | {wrong} | {shown} |")


def main(
    what: Annotated[str, typer.Argument(help="proof, ray or table.")],
    runs: Annotated[Path | None, typer.Argument(help="Where the plans are.")] = None,
) -> None:
    """Makes the protocol's plans in this process's children, or those through Ray; or prints the table."""
    if what == "table":
        print_table()
    elif runs is None or what not in ("proof", "ray"):
        raise typer.BadParameter(what)
    elif what == "ray":
        proof_through_ray(runs)
    else:
        proof(runs)


if __name__ == "__main__":
    typer.run(main)
