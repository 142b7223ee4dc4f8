"""Runs one update by verl's own worker and engine, in a rank of a process group without Ray.

Only this module knows verl's internals: the environment of a worker process, its configuration, its worker, and the
layout of a rollout batch.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.gpu_check.machine import Machine, sample_folder
from verl_clipx.gpu_check.sample import ROWS, Row, Sample

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


# The default settings of all checks: nothing in them differs between a GPU and a CPU.
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
    # Announces two updates per rollout batch, so that nothing warns of a ratio that is always 1.
    f"data.train_batch_size={2 * ROWS}",
    f"{ACTOR}.ppo_mini_batch_size={ROWS}",
    # With a learning rate of 1, a weight's change is its gradient, on every rank and however verl shards the weights.
    # Momentum gives the optimizer a state that can be offloaded.
    f"{ACTOR}.optim.optimizer=SGD",
    f"{ACTOR}.optim.lr=1",
    f"{ACTOR}.optim.weight_decay=0",
    f"{ACTOR}.optim.clip_grad=1e9",
    f"{ACTOR}.optim.override_optimizer_config={{momentum:0.9}}",
)


def rank_environment(machine: Machine, rank: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of a rank's process."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(machine.ranks),
        "LOCAL_WORLD_SIZE": str(machine.ranks),
        # As under Ray, every process sees only one GPU.
        "LOCAL_RANK": "0",
        # verl reads both, but the ranks meet through the file below, so nothing listens there.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DIST_INIT_METHOD": f"file://{folder / 'meeting'}",
        "HF_HUB_OFFLINE": "1",
        "VERL_LOGGING_LEVEL": "ERROR",
    }
    if machine.device == "cpu":
        return environment | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(machine.ranks)))
    return environment | {"CUDA_VISIBLE_DEVICES": visible.split(",")[rank]}


@dataclass(frozen=True)
class Update:
    """What an update did.

    Args:
        loss: the policy loss, of the first mini-batch if there were several. NaN on ranks without outputs.
        change: each weight before the update minus the same weight after it, by name; float32, on the CPU. After one
            update with the optimizer of `COMMON` this is the gradient.
        bounds: bounds of an adaptive method, by the update's position. Under the scope "lagged" they follow from the
            statistics of the update's training pass; otherwise they are those that it was trained with.
        receipt: largest difference between the gradient on log_prob and the announced one, relative to the largest
            gradient; NaN if nothing was compared.
        closed_form_difference: the first update's, as the worker logs it; None if the worker made an extra pass.
        state_on: devices of the parameters and of the optimizer's state after the update.
        peak_bytes: largest memory that tensors took on this GPU during the update; 0 on a CPU.
    """

    loss: float
    change: dict[str, Tensor]
    bounds: dict[str, Tensor]
    receipt: float
    closed_form_difference: float | None
    state_on: frozenset[str]
    peak_bytes: int


class Bench:
    """Gives a check on the ranks its sample, verl's configurations, and updates by verl's worker."""

    def __init__(self, machine: Machine, folder: Path):
        import verl  # noqa: F401  (loads the plugin)
        from verl.utils.distributed import initialize_global_process_group_ray

        self.machine, self.folder = machine, folder
        initialize_global_process_group_ray(backend="gloo" if machine.device == "cpu" else None)
        self.rank = torch.distributed.get_rank()

    def sample(self, *, tied: bool = False) -> Sample:
        """Return the rows, and what their update should be."""
        return torch.load(sample_folder(self.folder, tied) / "sample.pt", weights_only=False)

    def configuration(self, *overrides: str, model: Path | None = None) -> Any:
        """Return verl's whole configuration under `COMMON` and further Hydra overrides, as its driver composes it.

        Args:
            model: the model's folder; None for the checks' model with untied embeddings.
        """
        found: list[Any] = [None]
        if self.rank == 0:
            found = [composed(self.machine, model or sample_folder(self.folder, False), overrides)]
        # Only the first rank composes it, because that takes longer than an update.
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]

    def actor(self, *overrides: str) -> Any:
        """Return verl's ActorConfig under Hydra overrides."""
        from verl.utils.config import omega_conf_to_dataclass

        return omega_conf_to_dataclass(self.configuration(*overrides).actor_rollout_ref.actor)

    def update(self, *overrides: str, updates: int = 1, tied: bool = False, recomputed: bool = False) -> Update:
        """Train on the sample, starting from the saved weights.

        Args:
            recomputed: whether old_log_probs are computed beforehand, as in verl's trainers; otherwise they are the
                sample's.
        """
        # What the run announces, and the worker's receipt compares.
        announced = (f"data.train_batch_size={updates}", f"{ACTOR}.ppo_mini_batch_size=1")
        config = self.configuration(*announced, *overrides, model=sample_folder(self.folder, tied))
        return update(config, self.sample(tied=tied).rows, updates=updates, recomputed=recomputed)


def composed(machine: Machine, model: Path, overrides: Sequence[str]) -> Any:
    """Compose verl's whole configuration for a machine and a model."""
    from hydra import compose, initialize_config_module

    hardware = ["+hardware=cpu"] if machine.device == "cpu" else []
    given = [f"{MODEL}.path={model}", f"trainer.n_gpus_per_node={machine.ranks}", "trainer.nnodes=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*hardware, *given, *COMMON, *overrides])


def update(config: Any, rows: Sequence[Row], *, updates: int = 1, recomputed: bool = False) -> Update:
    """Build verl's worker, and update its actor on rows.

    Args:
        rows: the rows of all ranks, of which each data-parallel rank takes its share.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import ActorRolloutRefWorker

    with unpatched_model():
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
        engine = worker.actor.engine
        before = weights(engine)
        ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
        share = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
        on_gpu = config.trainer.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        data = rollout_batch(share, mini_batch=len(rows) // updates)
        if recomputed:
            data["old_log_probs"] = old_log_probs(worker, data.copy(), share)
        steps = planned_steps(worker.actor.planner)
        output = worker.update_actor(data)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        state_on = devices_of(engine)
        after = weights(engine)
    metrics = {} if output is None else tu.get(output, "metrics")
    bounds = {step.position: step.decision for step in steps if step.decision is not None}
    if (planner := worker.actor.planner) is not None:
        planner.flush()
        bounds |= {position: planner.method.decide(found) for position, found in planner.state.statistics.items()}
    del worker, engine, planner
    gc.collect()
    return Update(
        loss=float(metrics.get("actor/pg_loss", [float("nan")])[0]),
        change={name: value - after[name] for name, value in before.items()},
        bounds={position: found.cpu() for position, found in bounds.items()},
        receipt=float(metrics.get(RECEIPT.key, [float("nan")])[0]),
        closed_form_difference=metrics.get("clipx/closed_form_difference", [None])[0],
        state_on=state_on,
        peak_bytes=peak,
    )


def planned_steps(planner: Any) -> list[Any]:
    """Return a list that will receive every optimizer step that a planner plans from now on.

    Args:
        planner: the worker's, or None if it has none; then the list stays empty.
    """
    steps: list[Any] = []
    if planner is not None:
        original = planner.plan

        def plan(*words: Any, **named: Any) -> Any:
            steps.append(original(*words, **named))
            return steps[-1]

        planner.plan = plan
    return steps


def old_log_probs(worker: Any, data: Any, rows: Sequence[Row]) -> Tensor:
    """Return the responses' log-probabilities, jagged, computed as verl's trainers compute them before an update."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
    found = worker.compute_log_prob(data)["log_probs"].unbind()
    responses = [values[row.prompt - 1 : -1].float() for row, values in zip(rows, found, strict=True)]
    return torch.nested.as_nested_tensor(responses, layout=torch.jagged)


@contextmanager
def unpatched_model() -> Iterator[None]:
    """Restore the forward pass of transformers' model at the end, because verl's fused kernels replace it."""
    from transformers import Qwen2ForCausalLM

    original = Qwen2ForCausalLM.forward
    try:
        yield
    finally:
        Qwen2ForCausalLM.forward = original


def weights(engine: Any) -> dict[str, Tensor]:
    """Return the full weights as the rollout receives them, float32 on the CPU, by their names in the checkpoint."""
    named, _ = engine.get_per_tensor_param()
    return {name: value.detach().float().cpu().clone() for name, value in named}


def devices_of(engine: Any) -> frozenset[str]:
    """Return the types of device that hold the parameters and the optimizer's state."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    tensors = [*engine.module.parameters(), *(value for value in states if isinstance(value, Tensor))]
    return frozenset(tensor.device.type for tensor in tensors)


def rollout_batch(rows: Sequence[Row], *, mini_batch: int) -> Any:
    """Return rows in verl's layout of a rollout batch.

    Args:
        mini_batch: number of rows in an optimizer step, over all ranks.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def jagged(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    fields = {
        "input_ids": [row.ids for row in rows],
        "position_ids": [torch.arange(len(row.ids)) for row in rows],
        "prompts": [row.ids[: row.prompt] for row in rows],
        "responses": [row.ids[row.prompt :] for row in rows],
        "old_log_probs": [row.old_log_prob for row in rows],
        # They differ from old_log_probs: equal ones would mean that the rollout's log-probabilities replace the old
        # policy's.
        "rollout_log_probs": [row.old_log_prob - 0.01 for row in rows],
        "response_mask": [row.mask for row in rows],
        "loss_mask": [row.mask for row in rows],
        "advantages": [torch.full((len(row.old_log_prob),), row.advantage) for row in rows],
    }
    data = TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=[len(rows)])
    tu.assign_non_tensor(
        data,
        global_batch_size=mini_batch,
        mini_batch_size=mini_batch,
        temperature=1.0,
        dataloader_kwargs={"shuffle": False},
        epochs=1,
        seed=1,
    )
    # Marks the samples as drawn with other weights than the model's. Otherwise the receipt would compare them with the
    # model's log-probabilities.
    tu.assign_non_tensor_stack(data, "extra_fields", [{"max_global_steps": -1}] * len(rows))
    return data


def loss_call(actor: Any, tokens: dict[str, Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that runs the forward and backward pass of the loss that a configuration names.

    Args:
        tokens: old_log_prob, log_prob, advantages and response_mask, each (sequences, response length).

    Returns:
        A function without arguments; it returns the loss, 0-d, and its gradient on log_prob.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    function = get_policy_loss_fn(actor.policy_loss.loss_mode)

    def call() -> tuple[Tensor, Tensor]:
        log_prob = tokens["log_prob"].clone().requires_grad_(True)
        loss, _ = function(**{**tokens, "log_prob": log_prob}, loss_agg_mode="token-mean", config=actor)
        loss.backward()
        return loss.detach(), log_prob.grad

    return call
