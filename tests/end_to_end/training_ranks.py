"""A real training worker (FSDP2 over gloo, a small transformer) on several ranks, without Ray.

In float64, which verl does not offer: the bounds can then be compared to 1e-12, since only the order of summation is
left. The optimizer's step only records the gradient, so that every case starts from the same weights.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tests.training.cpu.policy import VOCABULARY_SIZE, random_policy, save_checkpoint

MODEL_SEED = 3


@dataclass(frozen=True)
class Case:
    """One optimizer step."""

    # The method's group, further groups and keys.
    overrides: tuple[str, ...]
    # Sequences of a micro-batch, without which it has all of the rank's; or its tokens, under dynamic batch size.
    micro_batch_size: int | None = None
    dynamic_tokens: int | None = None
    # Lopti's pass, low or high.
    token_pass: str | None = None
    # As for `build_worker`.
    engine: tuple[str, ...] = ()
    model: tuple[tuple[str, Any], ...] = ()
    attention: str = "sdpa"
    # Whether to compute log-probabilities too.
    infer: bool = False


@dataclass
class Result:
    """What an optimizer step did."""

    # Of the method over the mini-batch; None where each micro-batch decides for itself.
    decision: list[float] | None = None
    # By parameter, summed over ranks.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    # Those that the plugin itself issued.
    collectives: int = 0
    forwards: int = 0
    # Of each row's response, over all ranks, if they were asked for.
    log_probs: list[torch.Tensor] = field(default_factory=list)
    # What of the engine's options is seen to be in force.
    options: dict[str, Any] = field(default_factory=dict)

    def values(self, metric: str) -> list[float]:
        """A metric under the name that verl logs it by."""
        return [self.metrics[metric if metric in self.metrics else metric.removeprefix("actor/")]]


def make_rows(folder: Path, count: int, *, masked: tuple[int, ...], drift: float) -> Path:
    """Ragged sequences, of which the response of some counts nothing, in a file of the folder; their old
    log-probabilities differ from the policy's own by a standard deviation of `drift`."""
    model = random_policy(MODEL_SEED).double()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        prompt = int(torch.randint(2, 6, (1,), generator=generator))
        response = int(torch.randint(3, 13, (1,), generator=generator))
        ids = torch.randint(2, VOCABULARY_SIZE, (prompt,), generator=generator)
        with torch.no_grad():
            # Sampled from the policy, so that every range of probability occurs.
            for _ in range(response):
                probabilities = model(ids[None]).logits[0, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)])
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        log_prob = log_probs[:-1].gather(1, ids[1:, None])[-response:, 0]
        noise = torch.randn(response, generator=generator, dtype=torch.float64)
        old = (log_prob + drift * noise).clamp(max=-1e-3)
        mask = torch.ones(response, dtype=torch.int64)
        mask[torch.rand(response, generator=generator) < 0.1] = 0
        mask[0] = 1
        if index in masked:
            mask.zero_()
        advantage = torch.randn(1, generator=generator, dtype=torch.float64).expand(response).clone()
        rows.append(dict(ids=ids, prompt=prompt, response=response, old=old, mask=mask, advantage=advantage))
    torch.save(rows, folder / "rows.pt")
    return folder / "rows.pt"


def make_policy(folder: Path) -> Path:
    """A checkpoint of a small random transformer."""
    return save_checkpoint(folder, random_policy(MODEL_SEED))


def mini_batch(rows: list[dict[str, Any]], *, sequences: int) -> Any:
    """This rank's rows as verl's jagged mini-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    values = {
        "input_ids": [row["ids"] for row in rows],
        "old_log_probs": [row["old"] for row in rows],
        "response_mask": [row["mask"] for row in rows],
        "loss_mask": [row["mask"] for row in rows],
        "advantages": [row["advantage"] for row in rows],
        "position_ids": [torch.arange(len(row["ids"])) for row in rows],
        "prompts": [row["ids"][: row["prompt"]] for row in rows],
        "responses": [row["ids"][row["prompt"] :] for row in rows],
        "rollout_log_probs": [row["old"] - 0.01 for row in rows],
    }
    fields = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in values.items()}
    data = TensorDict(fields, batch_size=[len(rows)])
    tu.assign_non_tensor(data, global_batch_size=sequences, temperature=1.0)
    return data


@functools.cache
def actor_config(overrides: tuple[str, ...]) -> Any:
    """verl's ActorConfig under a CPU run's settings."""
    from verl.utils.config import omega_conf_to_dataclass

    from tests.composition import composition

    return omega_conf_to_dataclass(composition("+hardware=cpu", *overrides).actor_rollout_ref.actor)


def build_worker(
    policy: Path,
    worker_class: type | None = None,
    *,
    engine: tuple[str, ...] = (),
    attention: str = "sdpa",
    precision: torch.dtype = torch.float64,
    **model_options: Any,
) -> Any:
    """A training worker, by default of verl's actor, with verl's FSDP2 engine, by keys of the actor's engine and fields
    of verl's HFModelConfig; under transformers' flash attention its kernel is a stand-in.
    """
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if attention == "flash_attention_2":
        import tests.end_to_end.flash_attention  # noqa: F401
    PrecisionType.to_dtype = staticmethod(lambda _: precision)
    actor = actor_config(engine)
    # LoRA's first weights are random.
    torch.manual_seed(MODEL_SEED)
    options = {"use_remove_padding": False, "enable_gradient_checkpointing": False, **model_options}
    model = HFModelConfig(path=str(policy), override_config={"attn_implementation": attention}, **options)
    parts = {"engine_config": actor.engine, "optimizer_config": actor.optim, "checkpoint_config": actor.checkpoint}
    config = TrainingWorkerConfig(model_type="language_model", model_config=model, **parts)
    worker = (worker_class or ActorRolloutRefWorker.actor_worker_cls)(config=config)
    worker.reset()
    # verl would enter an autocast to float64, which does not exist.
    worker.engine._autocast_dtype = torch.float32
    return worker


def full_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient."""
    return {
        name: getattr(parameter.grad, "full_tensor", lambda p=parameter: p.grad)().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def run_case(worker: Any, rows: list[dict[str, Any]], case: Case, config: Any) -> Result:
    """One optimizer step under a case's settings, which are composed in `config`."""
    from verl.workers.utils.losses import ppo_loss

    from verl_clipx.training.worker.layout import TokenPass
    from verl_clipx.training.worker.step import RolloutBatch

    engine = worker.engine
    result = Result(options=options_in_force(engine))
    part, parts = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    share = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
    data = mini_batch(share, sequences=len(rows))
    set_micro_batches(data, case, sequences=len(share))
    if case.infer:
        result.log_probs = log_probs_of_all(worker, data.copy(), share)
        layers = [value for name, value in engine.module.named_parameters() if ".layers." in name]
        # Whether the pass has left the layers' weights whole on each rank.
        result.options["layers are whole"] = not any(isinstance(value, DTensor) for value in layers)
    # Before the plugin wraps it.
    engine.optimizer_step = step_into(result, worker)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    for observer in [*worker.observers]:
        # The receipt, as after a run's first rollout batch: its collectives are counted.
        worker.observers.remove(observer)
    if case.token_pass is not None:
        # Not the first update, whose ratio may be taken for 1.
        worker.batch = RolloutBatch(token_pass=TokenPass(case.token_pass, 0.05, True), updates_before_pass=1)
    with counting(engine, result):
        output = worker.train_batch(data)
    # The class's own again, for the next case.
    del engine.optimizer_step
    worker.batch = None
    result.metrics = metrics_in(output)
    return result


def set_micro_batches(data: Any, case: Case, *, sequences: int) -> None:
    """Tells verl how to divide this rank's `sequences`."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=case.dynamic_tokens is not None,
        max_token_len_per_gpu=case.dynamic_tokens,
        micro_batch_size_per_gpu=case.micro_batch_size or sequences,
    )


def step_into(result: Result, worker: Any) -> Callable[[], float]:
    """An optimizer step that leaves the weights as they are, and puts their gradients into the result."""

    def optimizer_step():
        result.gradients = full_gradients(worker.engine.module)
        if worker.step is not None and worker.step.decision is not None:
            result.decision = worker.step.decision.tolist()
        return 1.0

    return optimizer_step


@contextlib.contextmanager
def counting(engine: Any, result: Result) -> Iterator[None]:
    """In the block, forward passes, the rows of their inputs and the plugin's collectives go into the result."""
    all_reduce = torch.distributed.all_reduce

    def counted_forward(*args, **kwargs):
        result.forwards += 1
        return type(engine).forward_step(engine, *args, **kwargs)

    def rows_of_input(module, arguments, keywords):
        result.options["rows of an input"] = len(keywords["input_ids"])

    def counted_all_reduce(*args, **kwargs):
        result.collectives += "verl_clipx" in sys._getframe(1).f_code.co_filename
        return all_reduce(*args, **kwargs)

    hook = engine.module.register_forward_pre_hook(rows_of_input, with_kwargs=True)
    with (
        patch.object(engine, "forward_step", counted_forward),
        patch.object(torch.distributed, "all_reduce", counted_all_reduce),
    ):
        yield
    hook.remove()


def metrics_in(output: Any) -> dict[str, float]:
    """The metrics of an optimizer step over all ranks, by their names; none on a rank without outputs."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric

    if output is None:
        return {}
    metrics = {}
    for key, value in tu.get(output, "metrics").items():
        if isinstance(value, list) and isinstance(value[0], Metric):
            metrics[key] = float(Metric.aggregate_dp(value))
    return metrics


def options_in_force(engine: Any) -> dict[str, Any]:
    """What an engine's model and methods show of its options."""
    return {
        "offload": (engine._is_offload_param, engine._is_offload_optimizer),
        "gradient checkpointing": engine.module.is_gradient_checkpointing,
        "chunked entropy": engine.compute_entropy_from_logits.__name__ == "entropy_from_logits_with_chunking",
        "adapter": hasattr(engine.module, "peft_config"),
        "mesh": tuple(engine.device_mesh.shape),
        "ranks of a sequence": torch.distributed.get_world_size() // engine.get_data_parallel_size(),
    }


def log_probs_of_all(worker: Any, data: Any, share: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Log-probabilities of every row's response, of all ranks' rows in their order."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
    output = worker.infer_batch(data)
    own = []
    # Of the ranks that share sequences one has outputs.
    if output is not None:
        pairs = zip(share, output["log_probs"].unbind(), strict=True)
        own = [log_prob[row["prompt"] - 1 : -1].clone() for row, log_prob in pairs]
    rows_of_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows_of_ranks, own)
    return [row for rows in rows_of_ranks for row in rows]


def run_rank(
    rank: int, world: int, meeting_file: str, results: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Makes this process one rank of a CPU run, with the plugin loaded; leaves rank 0's result in a file."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    # verl reads address and port; nobody listens.
    os.environ |= {"VERL_PLATFORM": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ["DIST_INIT_METHOD"] = f"file://{meeting_file}"
    torch.set_num_threads(1)
    import verl  # noqa: F401  (loads the plugin)

    result = function(rank, world, *arguments)
    if rank == 0:
        Path(results).write_bytes(pickle.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls function(rank, world, *arguments), which builds a worker, in a process a rank; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        arguments_of_rank = (world, str(Path(folder) / "ranks"), str(results), function, arguments)
        multiprocessing.set_forkserver_preload(["tests.end_to_end.imported_by_ranks"])
        torch.multiprocessing.start_processes(
            run_rank, arguments_of_rank, nprocs=world, join=True, start_method="forkserver"
        )
        return pickle.loads(results.read_bytes())


def cases_on_rank(rank: int, world: int, policy: str, rows: str, cases: list[Case], configs_file: Path) -> list[Result]:
    """Builds the worker of each engine once and runs every case, each from the same weights.

    `configs_file` keeps the composed configurations from call to call.
    """
    configs = pickle.loads(configs_file.read_bytes()) if configs_file.exists() else {}
    loaded_rows = torch.load(rows, weights_only=False)
    workers = {}
    results = []
    for case in cases:
        if case.overrides not in configs:
            configs[case.overrides] = actor_config(case.overrides)
        kind = (case.engine, case.model, case.attention)
        if kind not in workers:
            workers[kind] = build_worker(Path(policy), engine=case.engine, attention=case.attention, **dict(case.model))
        results.append(run_case(workers[kind], loaded_rows, case, configs[case.overrides]))
    # The others have read it: they have trained with this rank.
    if rank == 0:
        configs_file.write_bytes(pickle.dumps(configs))
    return results
