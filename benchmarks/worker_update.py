"""One update by verl's own worker and engine, in a rank of a process group without Ray, for tests/gpu and benchmarks.

Only this module knows verl's internals: the configuration of a worker, the worker itself, and the layout of a rollout
batch.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.base.shared_metrics import RECEIPT
from verl_clipx.training.worker.step import Observer, OptimizerStep, RolloutBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARDWARE = ("+hardware=cpu",) if DEVICE == "cpu" else ()


@dataclass(frozen=True)
class Row:
    """A prompt with its response.

    Args:
        ids: int64, (length,).
        prompt: the prompt's length.
        old_log_prob: float32, (response length,).
        mask: 0 or 1, int64, (response length,).
        advantage: of every token.
    """

    ids: Tensor
    prompt: int
    old_log_prob: Tensor
    mask: Tensor
    advantage: float


@dataclass(frozen=True)
class Update:
    """What an update did.

    Args:
        loss: the policy loss, of the first mini-batch if there were several. NaN on ranks without outputs.
        change: each weight before the update minus the same weight after it, by name; float32, on the CPU.
        bounds: bounds of an adaptive method, by the update's position. Under the scope "lagged" they follow from the
            statistics of the update's training pass; otherwise they are those that it was trained with.
        receipt: largest difference between the gradient on log_prob and the announced one, relative to the largest
            gradient; NaN if nothing was compared.
        state_on: devices of the parameters and of the optimizer's state after the update.
    """

    loss: float
    change: dict[str, Tensor]
    bounds: dict[str, Tensor]
    receipt: float
    state_on: frozenset[str]


def compose_run(model: Path, ranks: int, overrides: Sequence[str]) -> Any:
    """Compose verl's whole configuration for a model and a number of ranks, as its driver would."""
    from hydra import compose, initialize_config_module

    given = [f"actor_rollout_ref.model.path={model}", f"trainer.n_gpus_per_node={ranks}", "trainer.nnodes=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*HARDWARE, *given, *overrides])


def build_worker(config: Any) -> Any:
    """Build verl's worker of the actor; its `actor` is the plugin's training worker."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def update(config: Any, rows: Sequence[Row], *, updates: int = 1) -> Update:
    """Build verl's worker, and update its actor on rows.

    Args:
        rows: the rows of all ranks, of which each data-parallel rank takes its share.
    """
    from verl.utils import tensordict_utils as tu

    with unpatched_model():
        worker = build_worker(config)
        engine = worker.actor.engine
        before = weights(engine)
        ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
        share = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
        data = rollout_batch(share, mini_batch=len(rows) // updates)
        decisions = Decisions()
        if worker.actor.policy_loss is not None:
            worker.actor.observers.add(decisions)
        output = worker.update_actor(data)
        state_on = devices_of(engine)
        after = weights(engine)
    metrics = {} if output is None else tu.get(output, "metrics")
    bounds, actor = decisions.bounds, worker.actor
    if actor.policy_loss is not None and actor.state.waiting is not None:
        actor.state.keep_waiting(actor._all_reduce(actor.state.waiting.of_this_rank))
        decide = actor.policy_loss.clipx.method.decide
        bounds |= {position: decide(statistics) for position, statistics in actor.state.statistics.items()}
    del worker, engine, actor
    gc.collect()
    return Update(
        loss=float(metrics.get("actor/pg_loss", [float("nan")])[0]),
        change={name: value - after[name] for name, value in before.items()},
        bounds={position: found.cpu() for position, found in bounds.items()},
        receipt=float(metrics.get(RECEIPT.key, [float("nan")])[0]),
        state_on=state_on,
    )


class Decisions(Observer):
    """Keeps what was decided for each update, by its position."""

    def __init__(self) -> None:
        self.bounds: dict[str, Tensor] = {}

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        if step.decision is not None:
            self.bounds[batch.position] = step.decision


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
    """The full weights as the rollout receives them, float32 on the CPU, by their names in the checkpoint."""
    named, _ = engine.get_per_tensor_param()
    return {name: value.detach().float().cpu().clone() for name, value in named}


def devices_of(engine: Any) -> frozenset[str]:
    """The types of device that hold the parameters and the optimizer's state."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    tensors = [*engine.module.parameters(), *(value for value in states if isinstance(value, Tensor))]
    return frozenset(tensor.device.type for tensor in tensors)


def rollout_batch(rows: Sequence[Row], *, mini_batch: int) -> Any:
    """Rows in verl's layout of a rollout batch.

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
