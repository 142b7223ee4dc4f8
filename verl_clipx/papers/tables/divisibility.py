"""Checks how a run's batches and model divide over its GPUs, by verl's own arithmetic.

verl checks some of this in the driver (`validate_config`, which is called here), some in its workers minutes after the
launch, and some only when the first long response arrives. Here everything is checked before a GPU is requested.
"""

import contextlib
import copy
import io
import math
import warnings
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
FSDP = ("fsdp", "fsdp2")


class ConfigurationError(ValueError):
    """A configuration cannot run. The message names the key, its value, the problem and a fix."""

    def __init__(self, key: str, value: object, problem: str, fix: str):
        super().__init__(f"{key}={value}: {problem}. {fix}")
        self.key = key


@dataclass(frozen=True)
class Layout:
    """How a run is divided over its GPUs.

    Args:
        gpus: training ranks on all nodes together.
        shards: ranks that share one copy of the parameters (FSDP).
        sequence_parallel: ranks that share each sequence (Ulysses).
        data_parallel: groups of ranks that train on different sequences.
        replicas: rollout servers, each with a copy of the model.
        gpus_per_replica: GPUs of each rollout server.
        rows: responses in a rollout batch.
        rows_per_rank: responses of a rollout batch on each data-parallel rank.
        mini_batch_rows: responses in an optimizer step.
        mini_batch_rows_per_rank: responses of an optimizer step on each data-parallel rank.
        updates_per_epoch: optimizer steps in one pass over a rollout batch.
        longest: maximum prompt length plus maximum response length, in tokens.
    """

    nodes: int
    gpus: int
    shards: int
    sequence_parallel: int
    data_parallel: int
    replicas: int
    gpus_per_replica: int
    rows: int
    rows_per_rank: int
    mini_batch_rows: int
    mini_batch_rows_per_rank: int
    updates_per_epoch: int
    longest: int


def layout_of(config: DictConfig, shape: ModelShape) -> Layout:
    """Divide a run over its GPUs, as verl would.

    Raises:
        ConfigurationError: something does not divide, the estimator does not cover it, or verl rejects it.
    """
    _check_covered(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    for key, value in (("trainer.nnodes", nodes), ("trainer.n_gpus_per_node", per_node)):
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(key, value, "not a number of machines or GPUs", "Set a whole number above 0.")
    gpus = nodes * per_node
    sequence_parallel = sequence_parallel_size(config)
    _check_sequence_parallel(sequence_parallel, gpus, shape)
    fsdp_size = actor.fsdp_config.fsdp_size
    shards = fsdp_size if 0 < fsdp_size < gpus else gpus
    if gpus % shards:
        raise ConfigurationError(
            f"{ACTOR}.fsdp_config.fsdp_size",
            fsdp_size,
            f"does not divide the {gpus} GPUs",
            "Choose a divisor, or -1 to share the parameters over all of them.",
        )
    gpus_per_replica = _replica_size(config, shape, gpus, per_node)

    data_parallel = gpus // sequence_parallel
    prompts, mini_batch, samples = config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n
    rows, mini_batch_rows = prompts * samples, mini_batch * samples
    if prompts % mini_batch:
        raise ConfigurationError(
            f"{ACTOR}.ppo_mini_batch_size",
            mini_batch,
            f"does not divide data.train_batch_size={prompts} (both in prompts): verl's v1 trainer would fill the last "
            "mini-batch with padding, the older one stops",
            f"Choose a divisor of {prompts}.",
        )
    if mini_batch_rows % data_parallel:
        multiple = data_parallel // math.gcd(data_parallel, samples)
        raise ConfigurationError(
            f"{ACTOR}.ppo_mini_batch_size",
            mini_batch,
            f"{mini_batch} prompts x {ROLLOUT}.n={samples} = {mini_batch_rows} responses do not divide over "
            f"{data_parallel} data-parallel ranks ({gpus} GPUs / {sequence_parallel} that share a sequence)",
            f"Use a multiple of {multiple} prompts, or change trainer.nnodes or "
            f"{ACTOR}.ulysses_sequence_parallel_size.",
        )
    layout = Layout(
        nodes=nodes,
        gpus=gpus,
        shards=shards,
        sequence_parallel=sequence_parallel,
        data_parallel=data_parallel,
        replicas=gpus // gpus_per_replica,
        gpus_per_replica=gpus_per_replica,
        rows=rows,
        rows_per_rank=rows // data_parallel,
        mini_batch_rows=mini_batch_rows,
        mini_batch_rows_per_rank=mini_batch_rows // data_parallel,
        updates_per_epoch=prompts // mini_batch,
        longest=config.data.max_prompt_length + config.data.max_response_length,
    )
    _check_micro_batches(config, layout)
    _check_loader(config)
    check_with_verl(config)
    return layout


def sequence_parallel_size(config: DictConfig) -> int:
    """Return how many ranks share each sequence; in verl the actor's key overrides the engine's."""
    actor = config.actor_rollout_ref.actor
    if actor.ulysses_sequence_parallel_size > 1:
        return actor.ulysses_sequence_parallel_size
    return actor.fsdp_config.ulysses_sequence_parallel_size


def needs_reference(config: DictConfig) -> bool:
    """Return whether the run keeps a reference model, according to verl's own function."""
    from verl.trainer.ppo.utils import need_reference_policy

    return bool(need_reference_policy(config))


def check_with_verl(config: DictConfig) -> None:
    """Run the checks that verl's driver runs before it starts Ray, including those of the clipx node.

    Raises:
        ConfigurationError: verl or the method's configuration rejects the run.
    """
    from verl.utils.config import validate_config

    for key in sorted(OmegaConf.missing_keys(OmegaConf.create({"clipx": config.get("clipx")}))):
        raise ConfigurationError(
            key,
            "???",
            "has no value",
            "The run needs a measured value; for an estimate, any value will do.",
        )
    config = copy.deepcopy(config)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_config(config, use_reference_policy=needs_reference(config), use_critic=False)
    except Exception as error:
        # Hydra wraps exceptions that a dataclass raises.
        reason = error.__cause__ or error
        raise ConfigurationError(
            "configuration", "as composed", f"verl refuses it: {reason}", "Change the keys that it names."
        ) from error


def _check_covered(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_critic

    model, trainer = config.actor_rollout_ref.model, config.trainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        critic = need_critic(config)
    lora = model.lora_rank or (model.get("lora") or {}).get("rank")
    colocated = not trainer.use_v1 or trainer.v1.trainer_mode in ("sync", "colocate_async")
    for key, covered, fix in (
        (f"{ACTOR}.strategy", config.actor_rollout_ref.actor.strategy in FSDP, "Use fsdp or fsdp2."),
        ("actor_rollout_ref.model.lora_rank", not lora, "Set it to 0."),
        ("actor_rollout_ref.model.use_remove_padding", model.use_remove_padding, "Set it to True."),
        ("algorithm.adv_estimator", not critic, "Use an estimator without a critic."),
        (
            "trainer.v1.trainer_mode",
            colocated,
            "It generates on separate GPUs. To plan the memory of its training, set "
            "trainer.v1.trainer_mode=colocate_async.",
        ),
    ):
        if not covered:
            raise ConfigurationError(key, OmegaConf.select(config, key), "not covered by the estimator", fix)


def _check_sequence_parallel(sequence_parallel: int, gpus: int, shape: ModelShape) -> None:
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    if gpus % sequence_parallel:
        raise ConfigurationError(key, sequence_parallel, f"does not divide the {gpus} GPUs", "Choose a divisor.")
    _check_heads(
        key,
        sequence_parallel,
        shape,
        f"does not divide the model's {shape.num_attention_heads} attention heads, or does not match its "
        f"{shape.num_key_value_heads} key-value heads",
    )


def _replica_size(config: DictConfig, shape: ModelShape, gpus: int, per_node: int) -> int:
    rollout = config.actor_rollout_ref.rollout
    tensor_parallel = rollout.tensor_model_parallel_size
    size = tensor_parallel * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    if gpus % size or (size % per_node and per_node % size):
        raise ConfigurationError(
            key,
            tensor_parallel,
            f"a rollout server takes {size} GPUs, which does not divide the {gpus} GPUs, {per_node} a node",
            f"Choose a divisor of {per_node}.",
        )
    _check_heads(
        key,
        tensor_parallel,
        shape,
        f"the rollout engine cannot split {shape.num_attention_heads} attention heads and "
        f"{shape.num_key_value_heads} key-value heads over it",
    )
    return size


def _check_heads(key: str, ranks: int, shape: ModelShape, problem: str) -> None:
    # verl's Ulysses and vLLM's tensor parallelism follow the same rule: ranks split the key-value heads or copy them.
    queries, groups = shape.num_attention_heads, shape.num_key_value_heads
    if queries % ranks or (groups % ranks and ranks % groups):
        fix = f"Choose a divisor of {queries} that divides {groups} or is a multiple of it."
        raise ConfigurationError(key, ranks, problem, fix)


def _check_micro_batches(config: DictConfig, layout: Layout) -> None:
    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        raise ConfigurationError(
            f"{ROLLOUT}.log_prob_use_dynamic_bsz",
            rollout.log_prob_use_dynamic_bsz,
            f"must equal {ACTOR}.use_dynamic_bsz={actor.use_dynamic_bsz}",
            "Set only the actor's; the other follows it.",
        )
    passes = [
        (f"{ACTOR}.ppo", actor.use_dynamic_bsz, layout.mini_batch_rows_per_rank),
        (f"{ROLLOUT}.log_prob", rollout.log_prob_use_dynamic_bsz, layout.rows_per_rank),
    ]
    if needs_reference(config):
        passes.append((f"{REFERENCE}.log_prob", ref.log_prob_use_dynamic_bsz, layout.rows_per_rank))
    for prefix, dynamic, rows in passes:
        key = f"{prefix}_max_token_len_per_gpu" if dynamic else f"{prefix}_micro_batch_size_per_gpu"
        value = OmegaConf.select(config, key)
        if dynamic:
            if value * layout.sequence_parallel < layout.longest:
                raise ConfigurationError(
                    key,
                    value,
                    f"times {layout.sequence_parallel} GPUs that share a sequence is less than the longest sequence, "
                    f"data.max_prompt_length + data.max_response_length = {layout.longest}: verl stops when one comes",
                    f"Set at least {math.ceil(layout.longest / layout.sequence_parallel)}, or share sequences over "
                    f"more GPUs ({ACTOR}.ulysses_sequence_parallel_size); +hardware/response=64k does both.",
                )
        elif value is None or rows % value:
            raise ConfigurationError(
                key,
                value,
                f"does not divide the {rows} responses of a data-parallel rank",
                f"Choose a divisor of {rows}, or {ACTOR}.use_dynamic_bsz=True.",
            )


def _check_loader(config: DictConfig) -> None:
    fetched = config.data.get("gen_batch_size")
    prompts = config.data.train_batch_size
    if fetched and prompts % fetched and not config.algorithm.get("filter_groups", {}).get("enable"):
        raise ConfigurationError(
            "data.gen_batch_size",
            fetched,
            f"does not divide data.train_batch_size={prompts}",
            "Leave it null, or choose a divisor.",
        )
