"""What the checks of updates on GPUs share: the ranks, a sample, and verl's configuration.

    torchrun --nproc-per-node 2 --local-ranks-filter 0 -m pytest tests/gpu

Under torchrun only, with 1, 2 or 4 ranks: each test runs on all of them. Without a GPU it runs what a CPU can run.

For scripts/gpu.sh: SHARE=2/6 chooses the second of six shares of the tests, and OUTCOMES names a file that gets every
chosen test as `not run` and then what became of it, with the option of the marker `runs`.
"""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
collect_ignore_glob = [] if UNDER_TORCHRUN else ["test_*.py"]

if UNDER_TORCHRUN:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VERL_LOGGING_LEVEL": "ERROR"}
    if torch.cuda.is_available():
        # As under Ray, each process sees one GPU.
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[int(os.environ["LOCAL_RANK"])]
    else:
        os.environ["VERL_PLATFORM"] = "cpu"
        torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"

from worker_update import DEVICE, Update, compose_run, update  # noqa: E402  (after the environment is set)

from tests.gpu.sample import ROWS, Sample, make_sample  # noqa: E402

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ENGINE = f"{ACTOR}.fsdp_config"
# It divides a rank's mini-batch for every number of ranks and of updates.
MICRO_BATCH = 2


def precision(dtype: str) -> tuple[str, ...]:
    """Return the overrides for the dtype that FSDP computes in; parameters, reductions and buffers stay float32."""
    types = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return tuple(f"++{ENGINE}.mixed_precision.{key}={value}" for key, value in types.items())


def attention(name: str) -> str:
    """Return the override for transformers' attention."""
    return f"++{MODEL}.override_config.attn_implementation={name}"


# The settings of all tests: nothing in them differs between a GPU and a CPU.
COMMON = (
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.use_torch_compile=False",
    f"{ENGINE}.use_torch_compile=False",
    f"{ENGINE}.model_dtype=fp32",
    *precision("fp32"),
    attention("sdpa"),
    f"{MODEL}.use_remove_padding=False",
    f"{MODEL}.enable_gradient_checkpointing=False",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
    f"{ACTOR}.ppo_mini_batch_size={ROWS}",
    # With a learning rate of 1, a weight's change is its gradient, on every rank and however verl shards the weights.
    # Momentum gives the optimizer a state that can be offloaded.
    f"{ACTOR}.optim.optimizer=SGD",
    f"{ACTOR}.optim.lr=1",
    f"{ACTOR}.optim.weight_decay=0",
    f"{ACTOR}.optim.clip_grad=1e9",
    f"{ACTOR}.optim.override_optimizer_config={{momentum:0.9}}",
)


@dataclass
class Bench:
    """The ranks, with the samples of models with separate and with tied embeddings."""

    folder: Path
    rank: int
    ranks: int
    samples: dict[bool, Sample]

    def configuration(self, *overrides: str, tied: bool = False):
        """Return verl's whole configuration under `COMMON` and further Hydra overrides."""
        return compose_run(self.folder / str(tied), self.ranks, (*COMMON, *overrides))

    def update(self, *overrides: str, updates: int = 1, tied: bool = False) -> Update:
        """Train on a sample, from the saved weights, by as many updates a rollout batch as the run also announces."""
        announced = [f"data.train_batch_size={updates}", f"{ACTOR}.ppo_mini_batch_size=1"]
        if any(override.startswith("+clipx=") for override in overrides):
            # The sample's old log-probabilities are made up, and not recomputed as the line says.
            announced.append("clipx.receipt=warn")
        config = self.configuration(*announced, *overrides, tied=tied)
        return update(config, self.samples[tied].rows, updates=updates)


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Bench:
    """The bench of this process's rank."""
    import verl  # noqa: F401  (loads the plugin)
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray(backend="gloo" if DEVICE == "cpu" else None)
    folder = tmp_path_factory.mktemp("models")
    samples = {tied: make_sample(folder / str(tied), tied=tied) for tied in (False, True)}
    return Bench(folder, torch.distributed.get_rank(), torch.distributed.get_world_size(), samples)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps this process's share."""
    share, _, shares = os.environ.get("SHARE", "1/1").partition("/")
    items[:] = items[int(share) - 1 :: int(shares)]


def pytest_collection_finish(session):
    """Notes every test in it, so that one that a limit of time ends is not absent."""
    for item in session.items:
        item.user_properties += [("option", mark.args[0]) for mark in item.iter_markers("runs")]
        note(item.nodeid, "not run", item.user_properties)


def pytest_runtest_logreport(report):
    # Setup and teardown are of interest only if they are not as usual.
    if report.when == "call" or not report.passed:
        note(report.nodeid, report.outcome, report.user_properties)


def note(test, outcome, properties):
    """Adds a line to the file of outcomes, if one is wanted; rank 0 does."""
    if (path := os.environ.get("OUTCOMES")) and os.environ.get("RANK", "0") == "0":
        line = {"test": test.rpartition("/")[2], "outcome": outcome, **dict(properties)}
        # A line at once, so that several processes may share a file.
        with open(path, "a", buffering=1) as file:
            file.write(json.dumps(line) + "\n")


needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
needs_flash_attention = pytest.mark.skipif(
    DEVICE == "cpu" or importlib.util.find_spec("flash_attn") is None, reason="needs a GPU and flash-attn"
)
needs_two = pytest.mark.skipif(os.environ.get("WORLD_SIZE", "1") == "1", reason="needs two ranks: --nproc-per-node 2")
