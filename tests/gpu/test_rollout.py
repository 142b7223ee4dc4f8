"""Three steps of verl's trainer with vLLM on GPUs: samples come from the actor's current weights.

Not covered: vLLM on a CPU (tests/end_to_end/test_vllm.py). No GPU has run this test yet.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pandas
import pytest
import torch
from worker_update import DEVICE

STEPS, PROMPTS = 3, 8
# Largest divergence of the rollout from the actor, in nats a token (estimator k3). With the CPU rollout instead of vLLM
# it is 0; it is 0.07 if the samples come from the weights of two updates earlier.
DIVERGENCE = 0.02
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    return len(solution_str) % 2\n"


@pytest.mark.skipif(DEVICE == "cpu" or importlib.util.find_spec("vllm") is None, reason="needs a GPU and vLLM")
def test_the_rollouts_log_probabilities_are_the_actors(bench, tmp_path):
    if bench.rank == 0:
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{number} plus {number + 1}"}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
            for number in range(10, 10 + 4 * PROMPTS)
        ]
        pandas.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
        (tmp_path / "reward.py").write_text(REWARD)
        # The trainer starts its own Ray and its own ranks.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "RANK"))}
        for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            own.pop(name, None)
        log = tmp_path / "metrics.jsonl"
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(bench.folder / "False", tmp_path)]
        subprocess.run(command, env=own | {"VERL_FILE_LOGGER_PATH": str(log)}, cwd=tmp_path, check=True, timeout=420)
        steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
        divergences = [step["rollout_corr/k3_kl"] for step in steps if "rollout_corr/k3_kl" in step]
        assert len(divergences) == STEPS and all(abs(value) <= DIVERGENCE for value in divergences)
    torch.distributed.barrier()


def overrides(model, folder):
    """The run's Hydra overrides."""
    return [
        "+clipx=acpo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'prompts.parquet'}",
        f"data.val_files={folder / 'prompts.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.custom_reward_function.name=score",
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
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
    ]
