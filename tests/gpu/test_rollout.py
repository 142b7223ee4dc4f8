"""Three steps of verl's trainer with vLLM on GPUs: samples come from the actor's current weights. Not covered: vLLM on
a CPU (tests/end_to_end/test_vllm.py).
"""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pandas
import pytest
import torch
from worker_update import DEVICE

from tests.end_to_end.runs import common_overrides
from tests.gpu.conftest import ACTOR, ROLLOUT, attention
from verl_clipx.run.support import shape_of

STEPS = 3
PROMPTS_PER_STEP = 8
# The largest divergence of the rollout from the actor, in nats a token (estimator k3). With the CPU rollout instead of
# vLLM it is 0; it is 0.07 if the samples come from the weights of two updates earlier.
LARGEST_DIVERGENCE = 0.02
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    return len(solution_str) % 2\n"


@pytest.mark.runs("vLLM")
@pytest.mark.skipif(DEVICE == "cpu" or importlib.util.find_spec("vllm") is None, reason="needs a GPU and vLLM")
def test_the_rollouts_log_probabilities_are_the_actors(bench, tmp_path, record_property):
    overrides = list_overrides(bench.folder / "False", tmp_path)
    record_property("run", shape_of(bench.configuration(*overrides)))
    if bench.rank == 0:
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{number} plus {number + 1}"}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
            for number in range(10, 10 + 4 * PROMPTS_PER_STEP)
        ]
        pandas.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
        (tmp_path / "reward.py").write_text(REWARD)
        # The trainer starts its own Ray and its own ranks.
        of_torchrun = ("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(of_torchrun)}
        log = tmp_path / "metrics.jsonl"
        environment["VERL_FILE_LOGGER_PATH"] = str(log)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=420)
        steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
        divergences = [step["rollout_corr/k3_kl"] for step in steps if "rollout_corr/k3_kl" in step]
        assert len(divergences) == STEPS
        assert all(abs(divergence) <= LARGEST_DIVERGENCE for divergence in divergences)
    torch.distributed.barrier()


def list_overrides(model, folder):
    """Return the run's Hydra overrides."""
    task = SimpleNamespace(train=folder / "prompts.parquet", test=folder / "prompts.parquet", policy=model)
    return [
        *(override for override in common_overrides(task, folder, STEPS) if override != "+hardware=cpu"),
        "+clipx=acpo",
        attention("sdpa"),
        "trainer.n_gpus_per_node=1",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.custom_reward_function.name=score",
        # The steps are large, so that a rollout with old weights would be noticed.
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS_PER_STEP // 2}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.calculate_log_probs=True",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.enforce_eager=True",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ]
