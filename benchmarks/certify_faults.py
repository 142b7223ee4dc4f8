"""Pairs of arms with a planted fault, and healthy pairs: what `clipx certify` says of each; and traced runs whose
sampler is another than it should be, with their checkpoints: what `clipx recompute` says of each step.

Run: CLIPX_DATA=DATA python benchmarks/certify_faults.py RUNS    (DATA: where `table_fill.py reversal` put the data)

Small policies on reversal, trained by verl's trainer and worker in this process, each in a process of its own. RUNS is
where the runs' folders go; what is there is not made again. Prints a table in Markdown. docs/results/faults.md says
what other tools say of these runs, which read each one's verl.log.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Annotated, Any

import typer
from one_process.only_rank import become_only_rank

from verl_clipx.diagnose.questions import Arms, Verdict, answers_of
from verl_clipx.runs.folder import read_run

STEPS = 6
STUCK = 4
# The ratio is to the trainer's own log-probabilities, in one forward pass of all 64 responses.
DECOUPLED = (
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
)


def one_seed(trainer: Any) -> None:
    """The seed reaches the configuration and the log, but neither the order of prompts nor the samples."""
    trainer.replay_buffer.config.seed = 1
    trainer._init_dataloader(seed=1)


def same_samples(trainer: Any) -> None:
    """The sampler gets one seed for all responses of a prompt."""
    seed = trainer.replay_buffer._seed
    trainer.replay_buffer._seed = lambda prompt, session: seed(prompt, 0)


def stuck(trainer: Any) -> None:
    """From a step on the queue hands out one batch again and again."""
    sample, kept = trainer.replay_buffer.sample, []

    def again(**of_step: Any) -> Any:
        if trainer.global_steps < STUCK or not kept:
            kept[:] = [sample(**of_step), dict(trainer.queue.rows), dict(trainer.queue.tags)]
        trainer.queue.rows, trainer.queue.tags = dict(kept[1]), dict(kept[2])
        return kept[0]

    trainer.replay_buffer.sample = again


def sample_in_bfloat16(trainer: Any) -> None:
    """The sampler computes in bfloat16; the trainer stays in float32."""
    import torch

    for weight in trainer.replay_buffer.model.parameters():
        weight.data = weight.to(torch.bfloat16)


def skip_syncs(trainer: Any) -> None:
    """From a step on the sampler keeps its weights, but says that it has the new ones."""
    buffer, keep = trainer.replay_buffer, trainer.replay_buffer.keep
    buffer.keep = lambda version, weights: keep(version, weights if version < STUCK - 1 else buffer.kept[-1][1].items())


@dataclass(frozen=True)
class Setting:
    """A run: a preset of configs/recipe/reversal with overrides, and what happens before its first step."""

    preset: str
    overrides: tuple[str, ...] = ()
    act: Callable[[Any], None] | None = None
    reward: str = "pkg"


AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
SETTINGS = {
    **{preset: Setting(preset) for preset in ("grpo_4", "acpo_4", "cispo_4", "bapo_4", "grpo_16")},
    "lost_seed": Setting("acpo_4", act=one_seed),
    "same_samples": Setting("acpo_4", act=same_samples),
    "stuck": Setting("acpo_4", act=stuck),
    "one_update": Setting("acpo_1"),
    "wide": Setting("grpo_4", ("clipx.clip_low=0.0", "clipx.clip_high=20")),
    "another_normaliser": Setting("acpo_4", (AGGREGATION,)),
    "another_rate": Setting("acpo_4", ("actor_rollout_ref.actor.optim.lr=1e-5",)),
    "another_reward": Setting("acpo_4", reward="changed"),
}
TRACED = ("+clipx/trace=prompts", "clipx.trace.every=1", "clipx.trace.fraction=1")
SAMPLERS = {
    "sampler_float32": Setting("grpo_4", TRACED),
    "sampler_cooler": Setting("grpo_4", (*TRACED, "actor_rollout_ref.rollout.temperature=0.7")),
    "sampler_bfloat16": Setting("grpo_4", TRACED, sample_in_bfloat16),
    "sampler_bfloat16_slow": Setting(
        "grpo_4", (*TRACED, "actor_rollout_ref.actor.optim.lr=1e-7"), sample_in_bfloat16
    ),
    "sampler_skipped": Setting("grpo_4", TRACED, skip_syncs),
}  # fmt: skip
# By fault: the settings of both arms, and the question that should fail.
FAULTS = {
    "the clip never acts: one update a rollout batch": ("grpo_4", "one_update", "the clip acted"),
    "the clip never acts: bounds too wide": ("wide", "acpo_4", "the clip acted"),
    "a seed reaches neither data nor samples": ("grpo_4", "lost_seed", "every seed reached its run"),
    "one sampler seed for all responses of a prompt": ("grpo_4", "same_samples", "the responses of a group differ"),
    "a queue serves one batch again and again": ("grpo_4", "stuck", "no batch was trained twice"),
    "another normaliser": ("grpo_4", "another_normaliser", "one denominator"),
    "another learning rate": (
        "grpo_4", "another_rate", "the arms differ in nothing but what should differ"
    ),
    "the reward's file was changed between the arms": ("grpo_4", "another_reward", "one reward"),
}  # fmt: skip
HEALTHY = ("grpo_4", "acpo_4", "cispo_4", "bapo_4", "grpo_16")
# What fails, as it should, where the arms make 4 and 16 updates.
OF_UPDATES = ("the arms differ in nothing but what should differ", "as many steps, updates and prompts")
SEEDS = (1, 2)


def make(folder: Path, name: str, seed: int) -> None:
    """Trains a setting with a seed in this process."""
    from one_process.kept import compose_here
    from one_process.trainer import OneProcessTrainer, train

    import verl_clipx.papers.tasks.reversal.reward as reward

    setting, file = (SETTINGS | SAMPLERS)[name], folder.parent / "reward" / "score.py"

    class Faulty(OneProcessTrainer):
        def _init_dataloader(self, seed: int | None = None) -> None:
            if seed is not None:
                self.config.data.seed, given = seed, self.config.data.seed
            super()._init_dataloader()
            if seed is not None:
                self.config.data.seed = given

        def on_step_end(self) -> None:
            if name in SAMPLERS:
                weights = {key: weight.clone() for key, weight in self.actor_rollout_wg.weights()}
                checkpoint = folder / "checkpoints" / f"global_step_{self.global_steps}"
                self.replay_buffer.model.save_pretrained(checkpoint, state_dict=weights)
            super().on_step_end()

        def on_init_end(self) -> None:
            self.on_step_end()
            if setting.act is not None:
                setting.act(self)

    # All arms name one file; only what is in it tells them apart.
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Path(reward.__file__).read_text() + "\n# changed\n" * (setting.reward == "changed"))
    own = [f"reward.custom_reward_function.path={file}", f"trainer.total_training_steps={STEPS}"]
    own.append("trainer.logger=[file,console]")
    config = compose_here(f"reversal/{setting.preset}", seed, [*DECOUPLED, *setting.overrides, *own])
    train(config, folder / "metrics.jsonl", Faulty)


def write_console(folder: Path) -> None:
    """Writes verl.log: a run's configuration and steps as verl's main module prints them."""
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    record = json.loads((folder / "metrics.run.json").read_text())
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [concat_dict_to_str(step["data"], step["step"]) for step in steps]
    (folder / "verl.log").write_text("\n".join([pformat(record["configuration"]), *lines, ""]))


def write_table(runs: Path) -> int:
    """Prints the table; returns how many faults were missed and healthy pairs failed."""

    def said(*names: str) -> dict[str, Any]:
        arms = [[read_run(runs / f"{name}-seed{seed}") for seed in SEEDS] for name in names]
        return {answer.question: answer for answer in answers_of(Arms(*arms))}

    wrong = 0
    print("| planted | question | answer | other questions that fail |\n|---|---|---|---|")
    for fault, (first, second, question) in FAULTS.items():
        answers = said(first, second)
        others = [one for one, of in answers.items() if of.verdict is Verdict.FAILED and one != question]
        wrong += answers[question].verdict is not Verdict.FAILED
        row = (fault, question, f"{answers[question].verdict.value}: {answers[question].evidence}", ", ".join(others))
        print(f"| {' | '.join(row)} |")
    failed = {}
    for pair in itertools.combinations(HEALTHY, 2):
        right = OF_UPDATES if "grpo_16" in pair else ()
        answers = [answer for answer in said(*pair).values() if answer.question not in right]
        failed["/".join(pair)] = [answer.question for answer in answers if answer.verdict is Verdict.FAILED]
    wrong += sum(map(bool, failed.values()))
    print(f"\n{len(failed)} healthy pairs; failed: {json.dumps({key: of for key, of in failed.items() if of})}")
    return wrong


def write_samplers(runs: Path) -> None:
    """Prints what `clipx recompute` says of each run with a planted sampler, a line a step."""
    from verl_clipx.check.recompute import recompute, say

    for name in SAMPLERS:
        run = runs / f"{name}-seed{SEEDS[0]}"
        print(f"\n{name}")
        for answer in recompute(run, sorted((run / "checkpoints").iterdir())):
            print(f"- {say(answer).replace(f'{run}/checkpoints/', '')}")


def main(
    runs: Annotated[Path, typer.Argument(help="Where the runs go.")],
    only: Annotated[str | None, typer.Option(help="Make this run in this process, as NAME-seedN.")] = None,
) -> None:
    """Makes the runs that are missing, one after the other, and prints the table."""
    if only is not None:
        become_only_rank()
        name, _, seed = only.rpartition("-seed")
        make(runs / only, name, int(seed))
        return
    os.environ.setdefault("CLIPX_DATA", "data")
    for name, seed in [*itertools.product(SETTINGS, SEEDS), *((name, SEEDS[0]) for name in SAMPLERS)]:
        folder = runs / f"{name}-seed{seed}"
        if (folder / "done").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / "console.log").open("w") as output:
            command = [sys.executable, __file__, str(runs), "--only", folder.name]
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)
        write_console(folder)
        (folder / "done").touch()
    wrong = write_table(runs)
    write_samplers(runs)
    raise typer.Exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
