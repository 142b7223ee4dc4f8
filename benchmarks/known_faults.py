"""Runs with a fault that begins at a known step, and healthy ones: what `clipx diagnose` is tried on, apart from those
that its thresholds were fixed on.

Run: CLIPX_DATA=DATA python benchmarks/known_faults.py RUNS    (DATA: where `table_fill.py reversal` put the data)

Small policies on reversal, trained by verl's trainer and worker in this process. RUNS is where the logs go, a file
each: docs/results/runs/faults has those that tests read. What is there is not made again. What each fault should lead
to was written down before the first of these runs; tests/diagnose/test_rules.py counts.
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from one_process.kept import kept_path
from one_process.only_rank import become_only_rank

from verl_clipx.diagnose.rules import HELD_OUT_FALLS, RULES
from verl_clipx.runs import keys

# A fault of the running training begins at one of these steps of 16, by name and seed.
FIRST, CHOICES = 6, 5

# The ratio is to the trainer's own log-probabilities, in one forward pass of all 64 responses.
DECOUPLED = (
    "algorithm.rollout_correction.bypass_mode=false",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
)

# Of the record, what rules read.
RECORDED = (
    "data.train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.top_k",
    *(f"clipx.{name}" for name in ("alpha", "target", "contribution", "upper_stop", "upper_step")),
)
OF_VERL = ("actor/", "critic/", "response_length/", "prompt_length/", "rollout_corr/", "training/rollout_", "val-core/")
KEPT_GROUPS = ("actor/clipx/count/", "actor/clipx/gradient_mass/", "health/")


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


@dataclass(frozen=True)
class Setting:
    """A run.

    Args:
        preset: name of one of the presets in configs/recipe/reversal.
        overrides: on top of it.
        expected: the rules that should find it; each by the name that diagnosis.py gives it.
        also: further rules whose state the fault brings about too, so that their finding is no false alarm.
        since: the step at which a fault of the configuration can first be seen; 0: `act` begins at a step by the seed,
            or the run has no fault.
        act: what happens between two steps.
    """

    preset: str
    overrides: tuple[str, ...] = DECOUPLED
    expected: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    since: int = 0
    act: Callable[[Any], None] | None = None


ALIKE, COLLAPSE = "few prompts teach, because samples score alike", "reward collapse"
MISMATCH, CUT = "mismatch of rollout and training", "responses cut at the limit"
ENTROPY, EXPLOSION = "entropy collapse", "gradient explosion"
OLD = ("clipx_rollout.versions_old=3", "algorithm.rollout_correction.bypass_mode=true")
NO_BOUNDS = ("clipx.clip_low=0.0", "clipx.clip_high=null")

FAULTS = {
    "top_p": Setting(
        "grpo_4", (*DECOUPLED, "actor_rollout_ref.rollout.top_p=0.9"), ("truncated sampling",), (MISMATCH,), since=1
    ),
    "one_update": Setting("grpo_1", expected=("bounds idle: one update a rollout batch",), since=1),
    "old_samples": Setting("grpo_1", OLD, ("ratio anchored to another policy",), since=2),
    "low_target": Setting(
        "bapo_4", (*DECOUPLED, "clipx.target=0.05"), ("bounds idle: the search never started",), since=1
    ),
    "high_target": Setting("bapo_4", (*DECOUPLED, "clipx.target=0.95"), ("bounds saturated",), since=1),
    "wide_alpha": Setting("acpo_4", (*DECOUPLED, "clipx.alpha=20"), ("bounds idle: too few tokens a bin",), since=1),
    "short_limit": Setting("grpo_4", (*DECOUPLED, "data.max_response_length=47"), (CUT,), since=1),
    "lower_bound_only": Setting(
        "grpo_16", (*DECOUPLED, "clipx.clip_low=0.98", "clipx.clip_high=null"), ("one-sided clipping",), since=1
    ),
    "no_reward": Setting("grpo_4", expected=(COLLAPSE, ALIKE), act=no_reward),
    "nan_reward": Setting("grpo_4", expected=("skipped updates",), act=nan_reward),
    "no_end": Setting("grpo_4", expected=(CUT,), also=(COLLAPSE, EXPLOSION), act=no_end),
    "frozen_rollout": Setting("grpo_4", expected=(MISMATCH,), also=(COLLAPSE,), act=frozen_rollout),
    "rounded_rollout": Setting("grpo_4", expected=(MISMATCH,), also=(COLLAPSE,), act=rounded_rollout),
    "damaged_weights": Setting("grpo_4", expected=(COLLAPSE,), also=(EXPLOSION, ALIKE, CUT), act=damaged_weights),
    "huge_advantages": Setting("grpo_4", expected=(EXPLOSION,), act=huge_advantages),
    "fast_learning": Setting(
        "grpo_4", expected=(COLLAPSE,), also=(EXPLOSION, ALIKE, CUT, ENTROPY, MISMATCH), act=fast_learning
    ),
    "reward_for_a_letter": Setting(
        "grpo_16", (*DECOUPLED, "actor_rollout_ref.actor.optim.lr=2e-3"), (ENTROPY,), (COLLAPSE, ALIKE, CUT),
        act=reward_for_a_letter,
    ),
    # Whether and when reward or entropy collapse is the log's to say.
    "entropy_penalty": Setting(
        "grpo_16", (*DECOUPLED, "actor_rollout_ref.actor.entropy_coeff=-1.0", "actor_rollout_ref.actor.optim.lr=1e-3"),
        (ENTROPY,), (COLLAPSE, EXPLOSION, ALIKE, CUT),
    ),
    "no_bounds": Setting(
        "grpo_16", (*DECOUPLED, *NO_BOUNDS, "actor_rollout_ref.actor.optim.lr=3e-3"), (COLLAPSE,),
        (EXPLOSION, ALIKE, CUT, ENTROPY),
    ),
    "cispo_fast": Setting(
        "cispo_16", (*DECOUPLED, "actor_rollout_ref.actor.optim.lr=3e-3"), (COLLAPSE,), (EXPLOSION, ALIKE, CUT, ENTROPY)
    ),
    "ar_fast": Setting(
        "ar_16", (*DECOUPLED, "actor_rollout_ref.actor.optim.lr=3e-3"), (COLLAPSE,), (EXPLOSION, ALIKE, CUT, ENTROPY)
    ),
}  # fmt: skip
HEALTHY = {
    f"healthy_{preset}": Setting(preset)
    for preset in ("grpo_4", "acpo_4", "bapo_4", "cispo_4", "grpo_16", "acpo_16", "bapo_16", "dgpo_16")
}
# Short texts, from the policy of docs/results/evidence.md, validated every other step: stock verl's metrics are kept.
VALIDATED = (
    *DECOUPLED,
    "actor_rollout_ref.model.path=docs/results/evidence_policy",
    "data.max_response_length=24",
    "trainer.total_training_steps=20",
    "trainer.val_before_train=true",
    "trainer.test_freq=2",
    "data.val_max_samples=48",
)
VALIDATED_SETTINGS = {
    **{
        f"validated_{preset}": Setting(preset, VALIDATED)
        for preset in ("grpo_4", "acpo_4", "dapo_4", "cispo_4", "dgpo_4", "bapo_4", "grpo_16", "acpo_16")
    },
    "held_out_letter": Setting(
        "grpo_16", (*VALIDATED, "actor_rollout_ref.actor.optim.lr=1e-3"), (HELD_OUT_FALLS,),
        (ENTROPY, COLLAPSE, ALIKE, CUT, EXPLOSION), act=reward_for_a_letter,
    ),
    "served_again": Setting(
        "grpo_4", VALIDATED, ("one batch trained again and again",), (HELD_OUT_FALLS, ENTROPY, EXPLOSION),
        act=repeated_batch,
    ),
    "frozen_unseen": Setting(
        "grpo_1", VALIDATED, ("bounds idle while the sampler drifts away",),
        ("bounds idle: one update a rollout batch", MISMATCH, COLLAPSE), act=frozen_rollout,
    ),
    "starved": Setting("grpo_4", VALIDATED, ("no learning signal",), (ALIKE, COLLAPSE), act=no_reward),
    "saturated": Setting("grpo_4", VALIDATED, ("no learning signal",), (ALIKE,), act=full_reward),
}  # fmt: skip
SETTINGS = FAULTS | HEALTHY | VALIDATED_SETTINGS


def step_of(name: str, seed: int) -> int | None:
    """The first step at which a run's fault shows by construction; None: there is none, or the log has to say."""
    setting = SETTINGS[name]
    if setting.act is not None:
        return FIRST + zlib.crc32(f"{name} {seed}".encode()) % CHOICES
    return setting.since or None


def make(path: Path, name: str, seed: int) -> None:
    """Trains a setting with a seed and keeps its log."""
    from omegaconf import OmegaConf
    from one_process.kept import compose_here, describe, train_and_keep
    from one_process.trainer import OneProcessTrainer

    setting, at = SETTINGS[name], step_of(name, seed)

    class Faulty(OneProcessTrainer):
        """verl's trainer, to which something happens between two steps."""

        def on_step_end(self) -> None:
            """Before the step that shows the fault, after the weights of the step before were kept."""
            super().on_step_end()
            if setting.act is not None and self.global_steps == at - 1:
                setting.act(self)

    config = compose_here(f"reversal/{setting.preset}", seed, setting.overrides)
    record = {
        "name": name,
        "seed": seed,
        "preset": setting.preset,
        "overrides": list(setting.overrides),
        "since": at,
        "expected": list(setting.expected),
        "also": list(setting.also),
        "configuration": {key: value for key in RECORDED if (value := OmegaConf.select(config, key)) is not None},
        **describe(config),
    }
    wanted = {*(key for rule in RULES for key in rule.reads), *keys.DRAWN, *keys.HEALTH_COUNTS}

    def select(data: Mapping[str, float]) -> dict[str, float]:
        # A value that is not finite is null in the log, and left out here.
        groups = KEPT_GROUPS + OF_VERL * (setting.overrides[: len(VALIDATED)] == VALIDATED)
        return {
            key: value
            for key, value in data.items()
            if math.isfinite(value) and (key in wanted or key.startswith(groups))
        }

    train_and_keep(path, config, record, select, Faulty)


def main(
    runs: Annotated[Path, typer.Argument(help="Where the logs go.")],
    seed: Annotated[list[int] | None, typer.Option(help="By default 31.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="By default all but those with validations.")] = None,
) -> None:
    """Makes the runs that are missing, one after the other."""
    os.environ.setdefault("CLIPX_DATA", "data")
    become_only_rank()
    for number in seed or [31]:
        for one in name or FAULTS | HEALTHY:
            path = kept_path(runs, one, number)
            if path.exists():
                continue
            typer.echo(f"{one}, seed {number}", err=True)
            make(path, one, number)


if __name__ == "__main__":
    typer.run(main)
