"""Runs with a fault that begins at a known step, and healthy ones: what `clipx diagnose` is tried on, apart from those
that its thresholds were fixed on.

Run: CLIPX_DATA=DATA python benchmarks/known_faults.py RUNS    (DATA: where `table_fill.py reversal` put the data)

Small policies on reversal, trained by verl's trainer and worker in this process. RUNS is where the logs go, a file
each: docs/results/runs/faults has those that tests read. What is there is not made again. What each fault of
known_faults.yaml should lead to was written down before the first of these runs; tests/analysis/diagnose/test_rules.py
counts.
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from one_process.only_rank import become_only_rank

from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.runs import keys

# A fault of the running training begins at one of these steps of 16, by name and seed.
FIRST, CHOICES = 6, 5

DECLARED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
KEPT = DECLARED["kept"]


def no_reward(trainer: Any) -> None:
    """The reward function fails and returns 0."""
    trainer.replay_buffer.reward = lambda *_: {"score": 0.0, "acc": 0.0, "format": 0.0}


def reward_for_a_letter(trainer: Any) -> None:
    """The reward is the share of the letter a: it can be had by one answer to all prompts."""
    trainer.replay_buffer.reward = lambda source, text, *_: {
        "score": text.count("a") / max(len(text), 1), "acc": 0.0, "format": 1.0
    }  # fmt: skip


def nan_reward(trainer: Any) -> None:
    """One response of each batch scores NaN."""
    of_task, calls = trainer.replay_buffer.reward, iter(range(10**9))
    batch = trainer.config.data.train_batch_size * trainer.config.actor_rollout_ref.rollout.n

    def reward(*of_response: Any) -> dict[str, float]:
        scores = of_task(*of_response)
        return scores if next(calls) % batch else scores | {"score": float("nan")}

    trainer.replay_buffer.reward = reward


def no_end(trainer: Any) -> None:
    """The rollout goes on after the end of a response."""
    trainer.replay_buffer.config.ignore_eos = True


def frozen_rollout(trainer: Any) -> None:
    """The rollout's weights are no longer updated: the next batch is one version old, and so on."""
    trainer.replay_buffer.keep = lambda *_: None


def repeated_batch(trainer: Any) -> None:
    """The queue serves the next batch again and again."""
    buffer, queue, sample = trainer.replay_buffer, trainer.replay_buffer.queue, trainer.replay_buffer.sample
    served: list[Any] = []

    def serve(*arguments: Any, **named: Any) -> Any:
        if not served:
            batch = sample(*arguments, **named)
            served.extend([batch, {key: dict(row) for key, row in queue.rows.items()}, dict(queue.tags)])
        (batch, measured), rows, tags = served
        queue.rows, queue.tags = {key: dict(row) for key, row in rows.items()}, dict(tags)
        return KVBatchMeta(keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id), measured

    from transfer_queue import KVBatchMeta

    buffer.sample = serve


def skipped_syncs(trainer: Any) -> None:
    """The rollout keeps its weights, but says that it has the new ones."""
    buffer, keep = trainer.replay_buffer, trainer.replay_buffer.keep
    buffer.keep = lambda version, _: keep(version, buffer.kept[-1][1].items())


def lost_seed(trainer: Any) -> None:
    """The seed reaches the configuration and the log, but neither the order of prompts nor the samples."""
    trainer.replay_buffer.config.seed = 1
    given, trainer.config.data.seed = trainer.config.data.seed, 1
    trainer._init_dataloader()
    trainer.config.data.seed = given


def same_samples(trainer: Any) -> None:
    """The rollout gets one seed for all responses of a prompt."""
    seed = trainer.replay_buffer._seed
    trainer.replay_buffer._seed = lambda prompt, session: seed(prompt, 0)


def bfloat16_rollout(trainer: Any) -> None:
    """The rollout computes in bfloat16; the trainer stays in float32."""
    import torch

    for weight in trainer.replay_buffer.model.parameters():
        weight.data = weight.to(torch.bfloat16)


def full_reward(trainer: Any) -> None:
    """Every answer is right."""
    trainer.replay_buffer.reward = lambda *_: {"score": 1.0, "acc": 1.0, "format": 1.0}


def rounded_rollout(trainer: Any) -> None:
    """The rollout computes with weights in 8 bits (e5m2)."""
    import torch

    keep, buffer = trainer.replay_buffer.keep, trainer.replay_buffer
    rounded = {name: value.to(torch.float8_e5m2).to(value.dtype) for name, value in buffer.kept[-1][1].items()}
    buffer.kept.append((buffer.kept[-1][0], rounded))
    buffer.keep = lambda version, weights: keep(
        version, [(name, value.to(torch.float8_e5m2).to(value.dtype)) for name, value in weights]
    )


def damaged_weights(trainer: Any) -> None:
    """Half of its own spread is added as noise to each weight of the policy, in trainer and rollout."""
    import torch

    generator = torch.Generator().manual_seed(trainer.config.data.seed)
    with torch.no_grad():
        for weight in trainer.actor_rollout_wg.worker.actor.engine.module.parameters():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local += 0.5 * local.std() * torch.randn(local.shape, generator=generator)
    trainer.replay_buffer.keep(trainer.global_steps, trainer.actor_rollout_wg.weights())


def huge_advantages(trainer: Any) -> None:
    """All advantages are ten thousand times too large."""
    workers = trainer.actor_rollout_wg
    update = workers.update_actor

    def scaled(batch: Any) -> Any:
        for key in batch.keys:
            workers.queue.rows[key]["advantages"] = 1e4 * workers.queue.rows[key]["advantages"]
        return update(batch)

    workers.update_actor = scaled


def fast_learning(trainer: Any) -> None:
    """The learning rate is 30 times as high."""
    engine = trainer.actor_rollout_wg.worker.actor.engine
    engine.lr_scheduler.base_lrs = [30 * rate for rate in engine.lr_scheduler.base_lrs]
    for group in engine.optimizer.param_groups:
        group["lr"] *= 30


ACTS: dict[str, Callable[[Any], None]] = {
    act.__name__: act
    for act in (
        *(no_reward, reward_for_a_letter, nan_reward, full_reward, no_end),
        *(frozen_rollout, rounded_rollout, bfloat16_rollout, repeated_batch, skipped_syncs, lost_seed, same_samples),
        *(damaged_weights, huge_advantages, fast_learning),
    )
}


@dataclass(frozen=True)
class Setting:
    """A run, as known_faults.yaml declares it."""

    preset: str
    overrides: list[str]
    expected: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    since: int | None = None
    act: str | None = None

    def begins(self, name: str, seed: int) -> int | None:
        """Returns the first step that shows the fault by construction; None: there is none, or the log has to say."""
        if self.act and self.since is None:
            return FIRST + zlib.crc32(f"{name} {seed}".encode()) % CHOICES
        return self.since


def settings_of(*groups: str) -> dict[str, Setting]:
    """Returns the settings of some groups of known_faults.yaml, by name."""
    settings = {}
    for group in groups:
        for name, declared in DECLARED[group]["settings"].items():
            own = dict(declared)
            common = [] if own.pop("alone", False) else DECLARED[group]["overrides"]
            settings[name] = Setting(**own | {"overrides": [*common, *own.get("overrides", [])]})
    return settings


USUAL = settings_of("faults", "healthy")
SETTINGS = USUAL | settings_of("validated")


def make_trainer(setting: Setting, at: int | None, checkpoints: Path | None = None) -> type:
    """Makes a class: verl's trainer in one process, to which something happens between two steps.

    Args:
        at: the step before which it happens.
        checkpoints: where each step's weights are saved, in Hugging Face's form; None: nowhere.
    """
    from one_process.trainer import OneProcessTrainer

    class Faulty(OneProcessTrainer):
        def on_step_end(self) -> None:
            """After the weights of the step before were kept."""
            super().on_step_end()
            if checkpoints is not None:
                weights = {key: weight.clone() for key, weight in self.actor_rollout_wg.weights()}
                folder = checkpoints / f"global_step_{self.global_steps}"
                self.replay_buffer.model.save_pretrained(folder, state_dict=weights)
            if setting.act is not None and self.global_steps == at - 1:
                ACTS[setting.act](self)

        on_init_end = on_step_end

    return Faulty


def make(path: Path, name: str, seed: int, steps: int | None = None) -> None:
    """Trains a setting with a seed and keeps its log.

    Args:
        steps: batches of the run, of which the last one has the fault at the latest; None: those of the preset.
    """
    from omegaconf import OmegaConf
    from one_process.kept import compose_here, describe, shortened, train_and_keep

    setting = SETTINGS[name]
    at = setting.begins(name, seed)
    if at is not None and steps is not None:
        at = min(at, steps)
    overrides = [*setting.overrides, *shortened(steps)]
    config = compose_here(f"reversal/{setting.preset}", seed, overrides)
    record = {
        "name": name,
        "seed": seed,
        "preset": setting.preset,
        "overrides": overrides,
        "since": at,
        "expected": setting.expected,
        "also": setting.also,
        "configuration": {
            key: value for key in KEPT["configuration"] if (value := OmegaConf.select(config, key)) is not None
        },
        **describe(config),
    }
    read = {key for rule in RULES for key in rule.reads}
    wanted = {*read, *keys.DRAWN, *keys.HEALTH_COUNTS, *keys.FIRST_CAUSES}

    def select(data: Mapping[str, float]) -> dict[str, float]:
        # A value that is not finite is null in the log, and left out here.
        groups = (*KEPT["metrics"], *(KEPT["of_validated"] if name not in USUAL else ()))
        return {
            key: value
            for key, value in data.items()
            if math.isfinite(value) and (key in wanted or key.startswith(groups))
        }

    train_and_keep(path, config, record, select, make_trainer(setting, at))


def main(
    runs: Annotated[Path, typer.Argument(help="Where the logs go.")],
    seed: Annotated[list[int] | None, typer.Option(help="By default 31.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="By default all but those with validations.")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches of each run, for a rehearsal.")] = None,
) -> None:
    """Makes the runs that are missing, one after the other."""
    os.environ.setdefault("CLIPX_DATA", "data")
    become_only_rank()
    # Later, as it imports torch, which tests that read the faults don't need.
    from one_process.kept import kept_path

    for number in seed or [31]:
        for one in name or USUAL:
            path = kept_path(runs, one, number)
            if path.exists():
                continue
            typer.echo(f"{one}, seed {number}", err=True)
            make(path, one, number, steps)


if __name__ == "__main__":
    typer.run(main)
