"""Checks verl's rollout by vLLM: in a real run of a few steps, samples must come from the actor's current weights."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_clipx.common.files import last_lines
from verl_clipx.diagnostics.run_log import read_run_log
from verl_clipx.gpu_check.machine import Machine
from verl_clipx.gpu_check.ranks import end
from verl_clipx.gpu_check.report import Measured

STEPS = 3
SECONDS = 420
PROMPTS = 8
# Largest allowed divergence of the rollout from the actor in a step, in nats per token (estimator k3). With the CPU
# rollout instead of vLLM it is 0; it is 0.07 if the samples come from the weights of two updates earlier.
DIVERGENCE = 0.02
METRIC = "rollout_corr/k3_kl"


def why_not(machine: Machine) -> str | None:
    """Say why vLLM cannot run, or return None if it can."""
    if machine.device == "cpu":
        return "vLLM on a CPU needs a separate environment: tests/end_to_end/test_vllm.py"
    return None if machine.vllm else "vLLM is not installed"


def length_parity(data_source, solution_str, ground_truth, extra_info=None, **_) -> float:
    """Reward a response whose number of characters is even: random text earns this about half of the time."""
    return float(len(solution_str) % 2 == 0)


def write_prompts(path: Path) -> None:
    """Write prompts to a Parquet file in verl's format."""
    import pandas

    rows = [
        {
            "data_source": "gpu_check",
            "prompt": [{"role": "user", "content": f"{number} plus {number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(10, 10 + 4 * PROMPTS)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def overrides(machine: Machine, model: Path, folder: Path) -> list[str]:
    """Return the run's Hydra overrides."""
    return [
        "+clipx=acpo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'prompts.parquet'}",
        f"data.val_files={folder / 'prompts.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "reward.custom_reward_function.path=pkg://verl_clipx.gpu_check.rollout",
        "reward.custom_reward_function.name=length_parity",
        f"actor_rollout_ref.model.path={model}",
        # The steps are large, so that a rollout with old weights would be noticed.
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        f"trainer.n_gpus_per_node={machine.ranks}",
        "trainer.nnodes=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
        *(() if machine.flash_attention else ("+actor_rollout_ref.model.override_config.attn_implementation=sdpa",)),
    ]


def run(command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """Run a command, and end it with everything that it has started once the time is over.

    Returns:
        Its exit code; None if the time ran out.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=os.environ | environment
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def vllm_rollout(machine: Machine, model: Path, folder: Path) -> Measured:
    """Train for a few steps with vLLM's rollouts, and compare their log-probabilities with the actor's.

    Raises:
        RuntimeError: the run failed or took too long; the message contains the end of its output.
    """
    write_prompts(folder / "prompts.parquet")
    metrics, log = folder / "metrics.jsonl", folder / "run.log"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(machine, model, folder)]
    code = run(command, {"VERL_FILE_LOGGER_PATH": str(metrics)}, log, SECONDS)
    if code != 0:
        ended = f"did not end within {SECONDS} s" if code is None else f"ended with exit code {code}"
        raise RuntimeError("\n".join([f"verl.trainer.main_ppo {ended}", *last_lines(log, 60)]))
    return agreement(read_run_log(metrics)[METRIC].tolist())


def agreement(divergences: list[float]) -> Measured:
    """Return the verdict on the divergence of rollout and actor.

    Args:
        divergences: of each step, in nats per token.
    """
    largest = max(divergences, key=abs)
    return Measured(
        # Written so that a NaN does not pass.
        len(divergences) == STEPS and all(abs(divergence) <= DIVERGENCE for divergence in divergences),
        f"{len(divergences)} of {STEPS} steps, rollout and actor {largest:.1e} nats a token apart (k3), at most "
        f"{DIVERGENCE:g}",
        {f"divergence_step_{step}": divergence for step, divergence in enumerate(divergences, start=1)},
    )
