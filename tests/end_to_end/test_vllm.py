"""verl's own vLLM rollout on a CPU: weights reach vLLM after every update, in an environment of its own. Covers, with
`-m matrix`: four methods, 1 and 2 ranks, both modes, the engine's options, SmolLM2-135M, and the quick start's command
for a GPU, in bfloat16, with what a CPU needs. Not covered: requests
that an update interrupts (too short here to be sure of one), GPUs, sleep mode, tensor parallel rollouts, learning.
docs/dev/testing.md says what was run. The environment, VLLM_VENV or else .venv-vllm, is made by
scripts/setup_vllm_cpu.sh when it is missing.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.pretrained.smollm2 import prepare_model

from .conftest import Task
from .method_checks import SETTINGS, check_method
from .rollout_agreement import PREFIX
from .runs import REPOSITORY, Run, check_receipt, environment_loading, train
from .test_options import ENGINE_OPTIONS
from .test_quickstart import quickstart

pytestmark = pytest.mark.end_to_end

SECONDS_TO_SET_UP = 1800
# About 110 on two free cores.
SECONDS_TO_RUN = 900
STEPS = 3
TOLERANCE = 1e-4

METHODS = {
    "acpo": ["+clipx=acpo"],
    "bapo": ["+clipx=bapo", *SETTINGS["bapo"]],
    "dgpo": ["+clipx=dgpo"],
    "lopti": ["+clipx=grpo", "+clipx/update=lopti"],
}
MODES = ("sync", "colocate_async")
# The run that has ENGINE_OPTIONS.
UNDER_ENGINE_OPTIONS = ("acpo", 2, "sync")

VLLM = [
    "actor_rollout_ref.rollout.name=vllm",
    # Sleep mode is for GPUs.
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    # Compiling takes longer than the steps it would speed up.
    "actor_rollout_ref.rollout.enforce_eager=True",
    # Few at a time, so that in colocate_async an update finds requests in the middle and others not begun.
    "actor_rollout_ref.rollout.max_num_seqs=8",
]
ENVIRONMENT = {
    # GiB of cache for keys and values.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would pin its threads to cores, the same ones in every engine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # What vLLM compiles besides the model takes longer than it saves, and a killed run leaves half files in the cache.
    "TORCHDYNAMO_DISABLE": "1",
    **environment_loading("rollout_agreement"),
}

# All that the command for a GPU needs on a CPU: its device and no sleep mode, and of Ray worker slots and CPUs.
ON_A_CPU = [
    "trainer.device=cpu",
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.num_cpus=64",
]
# In bfloat16, whose rounding is most of it.
DIVERGENCE = 0.02


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment with vLLM."""
    folder = REPOSITORY / os.environ.get("VLLM_VENV", ".venv-vllm")
    script = ["bash", str(REPOSITORY / "scripts" / "setup_vllm_cpu.sh")]
    environment = {**os.environ, "VENV": str(folder), "BASE_VENV": sys.prefix}
    result = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=SECONDS_TO_SET_UP)
    assert result.returncode == 0, result.stderr[-6000:]
    return folder / "bin" / "python"


@pytest.fixture
def train_with_vllm(task, tmp_path, vllm_python):
    """A function that trains with vLLM's rollouts."""

    def run(*overrides: str, task: Task = task) -> Run:
        return train(
            task,
            tmp_path,
            *VLLM,
            *overrides,
            steps=STEPS,
            environment=ENVIRONMENT,
            python=str(vllm_python),
            seconds=SECONDS_TO_RUN,
        )

    return run


@pytest.mark.vllm
@pytest.mark.matrix
@pytest.mark.parametrize(("method", "ranks", "mode"), [*itertools.product(METHODS, (1, 2), MODES)])
def test_vllm_samples_from_the_actor_after_every_update(train_with_vllm, method, ranks, mode):
    setting = (f"trainer.n_gpus_per_node={ranks}", f"trainer.v1.trainer_mode={mode}")
    options = ENGINE_OPTIONS if (method, ranks, mode) == UNDER_ENGINE_OPTIONS else ()
    run = train_with_vllm(*METHODS[method], *setting, *options)
    assert list(run.log.index) == list(range(1, STEPS + 1))
    # Ages are logged in the steps that have them.
    for metric in check_receipt(run).filter(regex="^actor/(?!clipx/((low|high)/)?staleness/)"):
        assert run.log[metric].map(math.isfinite).all(), metric
    if method == "lopti":
        assert (run.log[["actor/clipx/low/grad_norm", "actor/clipx/high/grad_norm"]] > 0).all(axis=None)
    else:
        check_method(method, run)
    fresh = run.log[f"{PREFIX}/fresh_tokens"]
    gap = run.log[f"{PREFIX}/log_prob_gap"]
    # Also after an update; which rollout batches of colocate_async are fresh depends on time.
    assert fresh.loc[1] > 0 and fresh.loc[2:].sum() > 0 and gap.max() < TOLERANCE
    difference = run.log["training/rollout_probs_diff_max"].max()
    if mode == "sync":
        assert (fresh > 0).all() and difference < TOLERANCE
    else:
        # Tokens from before an update show what a rollout with old weights looks like.
        assert difference > 10 * TOLERANCE


@pytest.mark.vllm
@pytest.mark.matrix
def test_vllm_samples_from_a_pretrained_model(train_with_vllm, tmp_path):
    name = "sums"
    for split in ("train", "test"):
        build_split(definition_named(name), tmp_path / "data", split=split, options={"size": 32})
    files = [tmp_path / "data" / f"{split}.parquet" for split in ("train", "test")]
    run = train_with_vllm(
        "+clipx=acpo",
        "reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.sums.reward",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "data.max_response_length=8",
        task=Task(*files, prepare_model(tmp_path / "models")),
    )
    assert list(run.log.index) == list(range(1, STEPS + 1))
    assert (run.log[f"{PREFIX}/fresh_tokens"] > 0).all()
    assert run.log[f"{PREFIX}/log_prob_gap"].max() < TOLERANCE


@pytest.mark.vllm
@pytest.mark.matrix
def test_the_quick_start_for_a_gpu_trains_with_what_a_cpu_needs(vllm_python, tmp_path):
    variables = {name: value for name, value in ENVIRONMENT.items() if name.startswith(("VLLM", "TORCH"))}
    variables |= {"HARDWARE": "gpu", "MODEL": "smollm2", "VERL_PLATFORM": "cpu", "TOTAL_STEPS": "2"}
    variables |= {"TRAIN_BATCH_SIZE": "16", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": "4"}
    variables["PATH"] = os.pathsep.join([str(vllm_python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    runs, printed = quickstart(tmp_path, "acpo", *ON_A_CPU, "trainer.val_before_train=False", **variables)
    for method in ("grpo", "acpo"):
        (path,) = runs.glob(f"smollm2_sums_gpu/{method}*-seed1")
        run = read_run(path)
        assert (run.method, list(run.log.index)) == (method, [1, 2])
        actor = "actor_rollout_ref.actor"
        assert run.configuration[f"{actor}.strategy"] == "fsdp2"
        assert run.configuration[f"{actor}.fsdp_config.mixed_precision.param_dtype"] == "bf16"
        assert run.configuration["actor_rollout_ref.rollout.name"] == "vllm"
        assert sum(run.values("actor/grad_norm")) > 0
        assert all(abs(value) <= DIVERGENCE for value in run.values("rollout_corr/k3_kl"))
    assert len(list(runs.glob("smollm2_sums_gpu/acpo*-page/report.html"))) == 1 and "open the page" in printed
