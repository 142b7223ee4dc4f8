"""Checks that batches divide over optimizer steps and ranks, ranks over machines, and rows over micro-batches.

verl checks some of this in the driver, some in its workers minutes after the launch, and some only when the first long
response arrives. What depends on the model (attention heads) is not looked at.
"""

import math
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy

from verl_clipx.losses.base.refusal import written
from verl_clipx.run.keys import (
    ACTOR,
    DEVICES_A_NODE,
    FETCHED_PROMPTS,
    FSDP_SIZE,
    GROUP_FILTERING,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    MINI_BATCH,
    NODES,
    REFERENCE,
    RESPONSES,
    ROLLOUT,
    ROLLOUT_PROMPTS,
    STRATEGY,
    read,
)
from verl_clipx.run.trainer import trainer_of

# Under other engines, ranks share a sequence or the layers in ways of their own.
FSDP = ("fsdp", "fsdp2")
# Scripts count these on the machine that they run on, which may have none.
COUNTED = (NODES, DEVICES_A_NODE)
# What the rules calculate with besides.
SIZES = (ROLLOUT_PROMPTS, MINI_BATCH, RESPONSES, LONGEST_PROMPT, LONGEST_RESPONSE)


def counted_nothing(config: DictConfig) -> list[str]:
    """Return those of `COUNTED` that are 0 or an empty text, as a script's count is where there is nothing to count."""
    values = {key: OmegaConf.select(config, key) for key in COUNTED}
    return [key for key, value in values.items() if value == "" or (type(value) is int and value == 0)]


def wrong_numbers(config: DictConfig) -> list[str]:
    """Return a message for each number that the rules need and that is none, or not above 0; [] for other engines.

    Args:
        config: verl's whole configuration. Those of `counted_nothing` are not named.
    """
    if not has_rules(config):
        return []
    nothing = counted_nothing(config)
    values = {key: OmegaConf.select(config, key) for key in (*COUNTED, *SIZES) if key not in nothing}
    return [
        f"{key}={written(value)}: must be a whole number above 0."
        for key, value in values.items()
        if type(value) is not int or value < 1
    ]


def has_rules(config: DictConfig) -> bool:
    """Return whether the rules are known for the engine and the trainer of a run."""
    # Where sampling has machines of its own, other sizes have to divide.
    return OmegaConf.select(config, STRATEGY) in FSDP and trainer_of(read(config)).in_step


def what_does_not_divide(config: DictConfig) -> list[str]:
    """One message for each rule that a run breaks, with the key, its value and what to do; empty for other engines.

    Args:
        config: verl's whole configuration. Where nodes or GPUs are not counted, only wrong numbers are named.
    """
    if not has_rules(config):
        return []
    if wrong := wrong_numbers(config):
        return wrong
    if counted_nothing(config):
        return []
    actor = OmegaConf.select(config, ACTOR)
    gpus = math.prod(OmegaConf.select(config, key) for key in COUNTED)
    sharing = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
    if gpus % sharing:
        key = f"{ACTOR}.ulysses_sequence_parallel_size"
        return [f"{key}={sharing}: does not divide the {gpus} GPUs. Choose a divisor."]
    ranks = gpus // sharing
    return [*batches(config, ranks), *micro_batches(config, ranks, sharing), *groups(config, gpus)]


def batches(config: DictConfig, ranks: int) -> Iterator[str]:
    """Names sizes that do not divide the rollout batch, or whose responses do not divide over the ranks."""
    prompts = OmegaConf.select(config, ROLLOUT_PROMPTS)
    fetched = OmegaConf.select(config, FETCHED_PROMPTS)
    n = OmegaConf.select(config, RESPONSES)
    mini_batch = OmegaConf.select(config, MINI_BATCH)
    key = MINI_BATCH
    if prompts % mini_batch:
        yield (
            f"{key}={mini_batch}: does not divide {ROLLOUT_PROMPTS}={prompts} (both in prompts): verl's v1 trainer "
            f"would fill the last mini-batch with padding, the older one stops. Choose a divisor of {prompts}."
        )
    elif mini_batch * n % ranks:
        multiple = ranks // math.gcd(ranks, n)
        yield (
            f"{key}={mini_batch}: {mini_batch} prompts x {RESPONSES}={n} = {mini_batch * n} responses do not divide "
            f"over {ranks} data-parallel ranks. Use a multiple of {multiple} prompts, or change {NODES} or "
            f"{ACTOR}.ulysses_sequence_parallel_size."
        )
    if fetched and prompts % fetched and not OmegaConf.select(config, GROUP_FILTERING):
        yield f"{FETCHED_PROMPTS}={fetched}: does not divide {ROLLOUT_PROMPTS}={prompts}. Leave it null."


def micro_batches(config: DictConfig, ranks: int, sharing: int) -> Iterator[str]:
    """Micro-batches that do not divide a rank's responses, and token budgets below the longest sequence."""
    actor, rollout, ref = (OmegaConf.select(config, node) for node in (ACTOR, ROLLOUT, REFERENCE))
    rows = OmegaConf.select(config, ROLLOUT_PROMPTS) * rollout.n // ranks
    passes = [
        (f"{ACTOR}.ppo", actor.use_dynamic_bsz, actor.ppo_mini_batch_size * rollout.n // ranks),
        (f"{ROLLOUT}.log_prob", rollout.log_prob_use_dynamic_bsz, rows),
    ]
    if need_reference_policy(config):
        passes.append((f"{REFERENCE}.log_prob", ref.log_prob_use_dynamic_bsz, rows))
    longest = OmegaConf.select(config, LONGEST_PROMPT) + OmegaConf.select(config, LONGEST_RESPONSE)
    for prefix, dynamic, rows in passes:
        key = f"{prefix}_max_token_len_per_gpu" if dynamic else f"{prefix}_micro_batch_size_per_gpu"
        value = OmegaConf.select(config, key)
        if dynamic and value * sharing < longest:
            yield (
                f"{key}={value}: times {sharing} GPUs that share a sequence is less than {LONGEST_PROMPT} + "
                f"{LONGEST_RESPONSE} = {longest}: verl stops when such a sequence comes. Set at least "
                f"{math.ceil(longest / sharing)}, or share sequences over more GPUs "
                f"({ACTOR}.ulysses_sequence_parallel_size)."
            )
        # Where it is not set, verl's own check says so.
        elif not dynamic and value is not None and rows % value:
            yield (
                f"{key}={value}: does not divide the {rows} responses of a data-parallel rank. Choose a divisor, or "
                f"set {ACTOR}.use_dynamic_bsz=True."
            )


def groups(config: DictConfig, gpus: int) -> Iterator[str]:
    """Groups of GPUs, as a rollout server or with one copy of the parameters, that do not divide those of the run."""
    rollout = OmegaConf.select(config, ROLLOUT)
    machine = OmegaConf.select(config, DEVICES_A_NODE)
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if gpus % size or (size % machine and machine % size):
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: a rollout server takes {size} "
            f"GPUs, which does not divide the {gpus} GPUs, {machine} a machine. Choose a divisor of {machine}."
        )
    shard = OmegaConf.select(config, FSDP_SIZE)
    if 0 < shard < gpus and gpus % shard:
        yield (
            f"{FSDP_SIZE}={shard}: does not divide the {gpus} GPUs. Choose a divisor, or -1 to share "
            "the parameters over all of them."
        )
